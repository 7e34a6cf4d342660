//! `troika inspect`: what a checkpoint holds.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use troika_base::NumericClass;
use troika_base::units::human_bytes;
use troika_device::map_file;
use troika_engine::{HybridBytes, MemorySettings, ModelMemory, foresee_engines, plan_engines};
use troika_model::inspect::inspect;
use troika_model::{Checkpoint, ScaleCheck, WeightTable};

use crate::drafter::{self, Drafter};
use crate::hybrid::{HybridArgs, Wish};
use crate::report;
use crate::size::Size;

/// Show what a checkpoint holds: configuration, layers, formats, sizes, drafter, and what is missing or too much.
///
/// Every problem is listed, not only the first. The exit code is 1 if the checkpoint cannot be served.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of the checkpoint, or a single safetensors file beside its config.json.
    dir: PathBuf,
    /// Write the findings as JSON to FILE, or to standard output with `-`.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    /// Show instead how much memory serving the model takes, once every weight was read.
    #[arg(long)]
    memory: bool,
    /// With --memory: the arithmetic.
    #[arg(long, default_value = "fast", value_name = "CLASS", requires = "memory")]
    class: NumericClass,
    /// With --memory: worker threads; 0 = one per core.
    #[arg(long, default_value_t = 0, value_name = "N", requires = "memory", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: u16,
    /// With --memory: prompt tokens computed in one step. Without it 512, or with engines whole tiles.
    #[arg(long, value_name = "N", requires = "memory", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// With --memory: a neural engine, as `serve` takes it. What it holds depends on what it does: by default the shared expert and
    /// half of wq_b.
    #[arg(long, value_name = "ENGINE", requires = "memory")]
    npu: Option<String>,
    /// With --npu: rows of a tile.
    #[arg(long, default_value_t = 512, value_name = "N", requires = "npu", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tile: u32,
    /// With --npu: what the engine does of a kind of projection, as `serve` takes it.
    #[arg(long, value_delimiter = ',', value_name = "KIND=PLACEMENT,...", requires = "npu")]
    place: Vec<String>,
    /// With --memory: prompt chunks in flight at once.
    #[arg(long, default_value_t = 1, value_name = "N", requires = "memory", value_parser = clap::value_parser!(u8).range(1..=3))]
    wavefront: u8,
    /// With --memory: requests computed at once.
    #[arg(long, default_value_t = 1, value_name = "N", requires = "memory", value_parser = clap::value_parser!(u32).range(1..=4096))]
    running: u32,
    /// With --memory: tokens of each request and its answer.
    #[arg(long, default_value_t = 4096, value_name = "N", requires = "memory")]
    tokens: u32,
    /// With --memory: with the checkpoint's drafter at work.
    #[arg(long, value_enum, default_value_t = Drafter::Off, requires = "memory")]
    drafter: Drafter,
    /// With --memory: most memory for kept prefixes, as `serve` takes it.
    #[arg(long, default_value = "1G", value_name = "SIZE", requires = "memory")]
    cache_ram_limit: Size,
}

/// Prompt tokens of a step, as `serve` has them.
const CHUNK: usize = 512;

impl Args {
    /// The engine that is named, and what it would do.
    fn wish(&self) -> Result<Option<Wish>> {
        let Some(npu) = &self.npu else { return Ok(None) };
        ensure!(self.class == NumericClass::Fast, "--npu: engines go with --class fast, not {}", self.class);
        let pair = |text: &String| {
            let (kind, placement) = text.split_once('=').context("--place: expected KIND=PLACEMENT")?;
            Ok((kind.to_owned(), placement.to_owned()))
        };
        let place = self.place.iter().map(pair).collect::<Result<_>>()?;
        HybridArgs::of(npu, self.tile as usize, 0, &place)?.wish()?.engines().map(Some)
    }
}

/// What a serving process takes up.
#[derive(Debug, Serialize)]
struct Memory {
    class: &'static str,
    threads: usize,
    chunk: usize,
    wavefront: u8,
    running: u32,
    tokens: u32,
    #[serde(flatten)]
    model: ModelMemory,
    /// Code and libraries: pages of files.
    program_file_bytes: u64,
    /// Heap of an idle server, and the stacks of its threads.
    program_anonymous_bytes: u64,
    tokenizer_bytes: u64,
    /// What neural engines hold.
    engines: Option<HybridBytes>,
    file_bytes: u64,
    anonymous_bytes: u64,
    resident_bytes: u64,
    /// On top when the cache is full.
    cache_limit_bytes: u64,
}

impl Memory {
    /// Measured on Linux, x86-64: pages of the program and its libraries, and the heap of `troika serve` that depends on no
    /// model, with what the allocator keeps of that which steps gave back.
    const PROGRAM_FILE_BYTES: u64 = 14 << 20;
    const PROGRAM_ANONYMOUS_BYTES: u64 = 7 << 20;
    const STACK_BYTES: u64 = 64 << 10;
    /// Memory of a tokenizer for each byte of its file.
    const TOKENIZER_FACTOR: u64 = 12;

    fn foresee(args: &Args) -> Result<Self> {
        let checkpoint = Checkpoint::open(&args.dir, &map_file)?;
        let weights = WeightTable::build(&checkpoint, ScaleCheck::Skip)?;
        let wish = args.wish()?;
        let threads = match (args.threads, &wish) {
            (0, wish) => {
                let taken = wish.as_ref().map_or(0, |wish| wish.cores);
                std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(taken).max(1)
            }
            (threads, _) => threads.into(),
        };
        let tile = args.tile as usize;
        let chunk = match (args.chunk, &wish) {
            (Some(chunk), _) => chunk as usize,
            (None, Some(_)) => (CHUNK / tile).max(1) * tile,
            (None, None) => CHUNK,
        };
        let config = &checkpoint.config().model;
        let engines = wish.map(|wish| {
            let (backend, facts) = (&*wish.backend, weights.facts());
            let records = plan_engines(config.clone(), facts, &weights, backend, &wish.options);
            HybridBytes::from(foresee_engines(&records, backend, tile))
        });
        let settings = MemorySettings {
            class: args.class,
            chunk_tokens: chunk,
            wavefront: args.wavefront.into(),
            sequences: args.running as usize,
            tokens: args.tokens as usize,
            threads,
            drafter: args.drafter == Drafter::On,
        };
        if let (true, Some(reason)) = (settings.drafter, drafter::unavailable(weights.drafter(), Some(&args.dir))) {
            bail!("--drafter on: {reason}");
        }
        let model = ModelMemory::foresee(config, &weights, &settings);
        // A model without a tokenizer can be inspected, though not served.
        let tokenizer = std::fs::metadata(args.dir.join("tokenizer.json")).map_or(0, |metadata| metadata.len());
        let tokenizer_bytes = tokenizer * Self::TOKENIZER_FACTOR;
        let program_anonymous_bytes = Self::PROGRAM_ANONYMOUS_BYTES + threads as u64 * Self::STACK_BYTES;
        let file_bytes = model.file_bytes() + Self::PROGRAM_FILE_BYTES;
        let of_engines = engines.map_or(0, |HybridBytes { weights, banks, surfaces }| weights + banks + surfaces);
        let anonymous_bytes = model.anonymous_bytes() + of_engines + program_anonymous_bytes + tokenizer_bytes;
        Ok(Self {
            class: args.class.name(),
            threads,
            chunk,
            wavefront: args.wavefront,
            running: args.running,
            tokens: args.tokens,
            model,
            program_file_bytes: Self::PROGRAM_FILE_BYTES,
            program_anonymous_bytes,
            tokenizer_bytes,
            engines,
            file_bytes,
            anonymous_bytes,
            resident_bytes: file_bytes + anonymous_bytes,
            cache_limit_bytes: args.cache_ram_limit.0,
        })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, threads, chunk, wavefront, running, tokens, model, .. } = self;
        let steps = format!("{wavefront} x {chunk} tokens of prompts in flight");
        writeln!(f, "class {class}, {threads} threads, {steps}, {running} x {tokens} tokens\n")?;
        let mut line = |name: &str, bytes: u64| writeln!(f, "{name:<40}{:>12}", human_bytes(bytes));
        line("pages of files", self.file_bytes)?;
        for (class, bytes) in &model.mapped_weights {
            line(&format!("  weights as stored: {class}"), *bytes)?;
        }
        line("  mapped along with them", model.mapped_neighbours)?;
        line("  program and libraries", self.program_file_bytes)?;
        line("memory of its own", self.anonymous_bytes)?;
        for (class, bytes) in &model.copied_weights {
            line(&format!("  weights copied: {class}"), *bytes)?;
        }
        line("  values of the steps", model.step_values)?;
        line("  scratch of kernels", model.scratch)?;
        line("  state of sequences", model.state)?;
        if let Some(HybridBytes { weights, banks, surfaces }) = self.engines {
            line("  engines: weights in their form", weights)?;
            line("  engines: programs beside those", banks)?;
            line("  engines: surfaces of tiles", surfaces)?;
        }
        line("  tokenizer", self.tokenizer_bytes)?;
        line("  program and threads", self.program_anonymous_bytes)?;
        line("resident", self.resident_bytes)?;
        line("kept prefixes, on top of it, at most", self.cache_limit_bytes)?;
        let (fixed, rate) = (human_bytes(model.state_fixed), human_bytes(model.state_per_1000_tokens));
        writeln!(f, "\na sequence: {fixed} and {rate} for every 1000 tokens")
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if args.memory {
        let memory = Memory::foresee(args)?;
        match &args.json {
            Some(target) => report::write_json(target, &memory)?,
            None => report::print(&memory.to_string())?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let inspection = inspect(&args.dir, &map_file)?;
    match &args.json {
        Some(target) => report::write_json(target, &inspection)?,
        None => report::print(&inspection.to_string())?,
    }
    Ok(if inspection.is_complete() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
