//! `troika logits`: token ids in, logits out, so that anyone can compare us with another engine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use troika_engine::{Chunk, Runner, WantLogits};
use troika_graph::Acceptance;

use crate::model_source::ModelArgs;
use crate::{progress, report};

/// Tokens fed at once if nothing else is asked for.
const DEFAULT_CHUNK: usize = 512;

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
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    chunks: Vec<usize>,
    /// File to write.
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(!args.chunks.contains(&0), "--chunks: a chunk has at least one token");
    let tokens = read_tokens(&args.tokens)?;
    let rows = if args.last == 0 { tokens.len() } else { args.last.min(tokens.len()) };
    let model = args.model.open()?;
    let mut runner = model.runner(args.model.runner_options())?;
    let vocab_size = runner.config().vocab_size;
    let logits = compute(&mut runner, &tokens, &args.chunks, rows)?;
    write(&args.out, &tokens, rows, vocab_size, &logits)?;
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

fn compute(runner: &mut Runner, tokens: &[u32], sizes: &[usize], rows: usize) -> Result<Vec<f32>> {
    let sizes = if sizes.is_empty() { &[DEFAULT_CHUNK] } else { sizes };
    let bar = progress::tokens("computing", tokens.len() as u64);
    let sequence = runner.new_sequence();
    let first_wanted = tokens.len() - rows;
    let mut logits = Vec::new();
    let mut start = 0;
    for size in sizes.iter().cycle() {
        let end = (start + size).min(tokens.len());
        let wanted = end.saturating_sub(first_wanted.max(start));
        let chunk = Chunk {
            sequence,
            tokens: &tokens[start..end],
            logits: WantLogits::Last(wanted),
            acceptance: Acceptance::Whole,
        };
        let forward = runner.forward(&[chunk])?;
        logits.extend(forward.logits(0));
        runner.recycle(forward);
        bar.set_position(end as u64);
        start = end;
        if start == tokens.len() {
            break;
        }
    }
    bar.finish_and_clear();
    Ok(logits)
}

fn write(path: &Path, tokens: &[u32], rows: usize, vocab_size: usize, logits: &[f32]) -> Result<()> {
    let positions = tokens.len() - rows..tokens.len();
    let sizes = [rows * vocab_size * 4, tokens.len() * 8, rows * 8];
    let ends: Vec<usize> = sizes
        .iter()
        .scan(0, |end, size| {
            *end += size;
            Some(*end)
        })
        .collect();
    let header = json!({
        "__metadata__": { "producer": concat!("troika ", env!("CARGO_PKG_VERSION")) },
        "logits": { "dtype": "F32", "shape": [rows, vocab_size], "data_offsets": [0, ends[0]] },
        "tokens": { "dtype": "I64", "shape": [tokens.len()], "data_offsets": [ends[0], ends[1]] },
        "positions": { "dtype": "I64", "shape": [rows], "data_offsets": [ends[1], ends[2]] },
    });
    let mut header = header.to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut bytes = Vec::with_capacity(8 + header.len() + ends[2]);
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
    bytes.extend(tokens.iter().flat_map(|token| i64::from(*token).to_le_bytes()));
    bytes.extend(positions.flat_map(|position| (position as i64).to_le_bytes()));
    report::write_whole(path, &bytes)
}
