//! `troika logits`: token ids in, logits out, so that anyone can compare us with another engine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use troika_engine::{Chunk, Runner, WantLogits};
use troika_graph::Acceptance;

use crate::model_source::ModelArgs;
use crate::progress;
use crate::report::WholeFile;

/// Tokens fed at once if nothing else is asked for.
const DEFAULT_CHUNK: u32 = 512;
/// Logits turned into bytes at once.
const CHUNK_FLOATS: usize = 1 << 16;

/// Compute the logits of given token ids and write them to a safetensors file.
///
/// FILE gets `logits` (F32, [rows, vocabulary]), `tokens` (I64, the whole input) and `positions` (I64, [rows]). How the input
/// is cut into chunks must not change a bit.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON file with the token ids: a list, or an object with the list under `tokens`. `-` is standard input.
    #[arg(long, value_name = "TOKENS.json")]
    tokens: PathBuf,
    /// Rows to write, counted from the end; 0 = all.
    #[arg(long, default_value_t = 0, value_name = "N")]
    last: usize,
    /// Sizes of the chunks the input is fed in, repeated as needed; by default chunks of 512.
    #[arg(long, value_delimiter = ',', value_name = "SIZES", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunks: Vec<u32>,
    /// File to write.
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let tokens = read_tokens(&args.tokens)?;
    let rows = if args.last == 0 { tokens.len() } else { args.last.min(tokens.len()) };
    let model = args.model.open()?;
    let mut runner = model.runner(args.model.runner_options())?;
    let vocab_size = runner.config().vocab_size;
    let mut file = WholeFile::create(&args.out)?;
    file.write(&header(tokens.len(), rows, vocab_size))?;
    compute(&mut runner, &tokens, &args.chunks, rows, &mut file)?;
    for token in &tokens {
        file.write(&i64::from(*token).to_le_bytes())?;
    }
    for position in tokens.len() - rows..tokens.len() {
        file.write(&(position as i64).to_le_bytes())?;
    }
    file.finish()?;
    eprintln!("{}: logits of {rows} of {} tokens, {vocab_size} each", args.out.display(), tokens.len());
    Ok(ExitCode::SUCCESS)
}

fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let text = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?
    } else {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?
    };
    let name = path.display();
    let json: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("{name} is not valid JSON"))?;
    let Some(list) = json.get("tokens").unwrap_or(&json).as_array() else {
        bail!("{name} must hold a list of token ids, or an object with the list under `tokens`");
    };
    ensure!(!list.is_empty(), "{name} holds no tokens");
    let id = |(index, value): (usize, &serde_json::Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.with_context(|| format!("{name}: entry {index} is {value}, which is not a token id"))
    };
    list.iter().enumerate().map(id).collect()
}

/// Feeds the tokens in chunks and writes the logits of the last `rows` as they come.
fn compute(runner: &mut Runner, tokens: &[u32], sizes: &[u32], rows: usize, file: &mut WholeFile) -> Result<()> {
    let sizes = if sizes.is_empty() { &[DEFAULT_CHUNK] } else { sizes };
    let bar = progress::tokens("computing", tokens.len() as u64);
    let sequence = runner.new_sequence();
    let first_wanted = tokens.len() - rows;
    let mut start = 0usize;
    for size in sizes.iter().cycle() {
        let end = (start + *size as usize).min(tokens.len());
        let wanted = end.saturating_sub(first_wanted.max(start));
        let chunk = Chunk {
            sequence,
            tokens: &tokens[start..end],
            logits: WantLogits::Last(wanted),
            acceptance: Acceptance::Whole,
        };
        let forward = runner.forward(&[chunk])?;
        let logits = forward.logits(0);
        if let Some(index) = logits.iter().position(|logit| !logit.is_finite()) {
            let position = end - wanted + index / runner.config().vocab_size;
            bail!("the logits at position {position} are not finite: the checkpoint's weights are damaged");
        }
        for row in logits.chunks(CHUNK_FLOATS) {
            let bytes: Vec<u8> = row.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            file.write(&bytes)?;
        }
        runner.recycle(forward);
        bar.set_position(end as u64);
        start = end;
        if start == tokens.len() {
            break;
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Length and JSON that a safetensors file opens with; the data follows in the order of the names here.
fn header(num_tokens: usize, rows: usize, vocab_size: usize) -> Vec<u8> {
    let logits_end = rows * vocab_size * 4;
    let tokens_end = logits_end + num_tokens * 8;
    let header = json!({
        "__metadata__": { "producer": concat!("troika ", env!("CARGO_PKG_VERSION")) },
        "logits": { "dtype": "F32", "shape": [rows, vocab_size], "data_offsets": [0, logits_end] },
        "tokens": { "dtype": "I64", "shape": [num_tokens], "data_offsets": [logits_end, tokens_end] },
        "positions": { "dtype": "I64", "shape": [rows], "data_offsets": [tokens_end, tokens_end + rows * 8] },
    });
    let mut header = header.to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}
