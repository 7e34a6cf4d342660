//! `troika cache`: what is kept on disk, or would be.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use troika_base::NumericClass;
use troika_device::state::{BlockRows, Packing};
use troika_engine::StepRunner;
use troika_kvstore::format::HEADER_BYTES;
use troika_kvstore::{clear, usage, verify};

use crate::model_source::ModelArgs;
use crate::size::Size;

/// Look after prefixes kept on disk (`serve --cache-dir`).
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Say what a model's prefixes would take, without keeping any.
    Plan {
        #[command(flatten)]
        model: ModelArgs,
        /// The limit to reckon with.
        #[arg(long, default_value = "16G", value_name = "SIZE")]
        cache_disk_limit: Size,
    },
    /// Count files and bytes.
    Stat {
        /// The folder.
        dir: PathBuf,
    },
    /// Read every file whole and compare its checksums. Status 1 if one is damaged.
    Verify {
        /// The folder.
        dir: PathBuf,
    },
    /// Remove every file that is ours; nothing else is touched. Refused while a server uses the folder.
    Clear {
        /// The folder.
        dir: PathBuf,
    },
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Plan { model, cache_disk_limit } => plan(model, *cache_disk_limit)?,
        Command::Stat { dir } => {
            let usage = usage(dir).with_context(|| format!("cannot read {}", dir.display()))?;
            let line = |what: &str, files: u64, bytes: u64| println!("{what:<12}{files:>8} files  {}", Size(bytes));
            line("kept", usage.files, usage.bytes);
            line("damaged", usage.damaged_files, usage.damaged_bytes);
            line("temporary", usage.temporary_files, usage.temporary_bytes);
            line("foreign", usage.foreign_files, usage.foreign_bytes);
            println!("{} bytes in all", usage.total_bytes());
        }
        Command::Verify { dir } => {
            let (sound, damaged) = verify(dir).with_context(|| format!("cannot read {}", dir.display()))?;
            for (name, reason) in &damaged {
                println!("{name}: {reason}");
            }
            println!("{sound} sound, {} damaged", damaged.len());
            return Ok(if damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Clear { dir } => {
            let files = clear(dir).with_context(|| format!("cannot clear {}", dir.display()))?;
            println!("{files} files removed");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn plan(args: &ModelArgs, limit: Size) -> Result<()> {
    let model = args.open()?;
    let runner = model.runner(args.runner_options(args.class_or(NumericClass::Fast)))?;
    let shape = runner.state_shape();
    let header = HEADER_BYTES as u64;
    let packing = runner.packing();
    let (block, tokens) = (BlockRows::packed_bytes(shape, packing) + header, shape.block_tokens());
    let boundary = shape.boundary_bytes(packing) + header;
    println!("block of {tokens} tokens: {} ({block} bytes)", Size(block));
    println!("boundary: {} ({boundary} bytes)", Size(boundary));
    println!(
        "{limit} hold {} prompts of 4096 tokens with two boundaries each",
        limit.0 / (4096 / tokens as u64 * block + 2 * boundary)
    );
    println!(
        "{}",
        match packing {
            Packing::Floats => "numbers are kept as they are in memory, 32 bits each: equal bit by bit",
            Packing::Official { .. } => "rows are kept as the 8 and 4 bits they are rounded to: equal bit by bit",
        }
    );
    Ok(())
}
