//! `troika bench load`: a server under traffic.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use troika_base::NumericClass;
use troika_bench::client::Ask;
use troika_bench::corpus::Corpus;
use troika_bench::host::{HostFacts, HostState};
use troika_bench::load::{LoadRecord, Objective, SCHEMA, Shape, Traffic, VERSION, level};
use troika_bench::record::Program;
use troika_bench::server::{LOAD_PATIENCE, Launch, Server};

use super::{ending, stop_flag, subject};
use crate::progress;
use crate::report::{check_writable, print, write_record};

/// Measure latencies under traffic, and how many requests meet an objective.
///
/// Levels are run one after the other, each against a fresh server: requests that arrive at random moments (--rate), more and
/// more clients that ask without a pause (--clients), and agents that share long instructions (--agents). Without any of
/// them, a short sweep of clients. Prompts begin differently, but for those of agents.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder of a checkpoint. Without it, the built-in model nano.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Arithmetic: `fast`, `exact` or `official`.
    #[arg(long, default_value_t = NumericClass::Fast, value_name = "CLASS")]
    class: NumericClass,
    /// Requests per second that arrive, on average; a level for each number.
    #[arg(long, value_delimiter = ',', value_name = "R,R,...")]
    rate: Vec<f64>,
    /// Clients that ask without a pause; a level for each number.
    #[arg(long, value_delimiter = ',', value_name = "N,N,...", value_parser = clap::value_parser!(u16).range(1..=512))]
    clients: Vec<u16>,
    /// Agents at once; a level for each number.
    #[arg(long, value_delimiter = ',', value_name = "N,N,...", value_parser = clap::value_parser!(u16).range(1..=512))]
    agents: Vec<u16>,
    /// Tokens of the instructions that all agents start with.
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    instructions: u32,
    /// Turns of an agent.
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Requests of each level; agents have as many as they have turns.
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: u32,
    /// Tokens of prompts, one of them drawn for each; of agents, what a turn adds.
    #[arg(long, value_delimiter = ',', default_value = "128,256,512,1024", value_name = "N,N,...", value_parser = clap::value_parser!(u32).range(1..))]
    prompt_lengths: Vec<u32>,
    /// Tokens of each answer, at least 2.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    generate: u32,
    /// Same seed, same requests at the same moments.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Objective: most milliseconds to the first token.
    #[arg(long, default_value_t = 2000.0, value_name = "MS")]
    max_ttft: f64,
    /// Objective: most milliseconds per token after it, on average over a request.
    #[arg(long, default_value_t = 100.0, value_name = "MS")]
    max_tpot: f64,
    /// What prompts are made of: code_python, prose_en, chat_multi, or random token ids.
    #[arg(long, default_value = "code_python", value_name = "NAME")]
    corpus: Corpus,
    /// Write the record as JSON to FILE, or to standard output with `-`, then without the table.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    /// More flags for `troika serve`, after `--`.
    #[arg(last = true, value_name = "FLAGS")]
    serve: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let levels = levels(args)?;
    args.json.as_deref().map_or(Ok(()), check_writable)?;
    let opened = subject::open(args.model.clone(), args.class, args.corpus)?;
    let program = std::env::current_exe().context("cannot find the program that runs")?;
    let shape = Shape {
        requests: args.requests as usize,
        prompt_tokens: args.prompt_lengths.iter().map(|len| *len as usize).collect(),
        generate: args.generate as usize,
        seed: args.seed,
        objective: Objective { ttft_ms: args.max_ttft, tpot_ms: args.max_tpot },
    };
    for traffic in &levels {
        let (longest, most, name) = (traffic.longest(&shape), opened.max_context_tokens, &opened.facts.name);
        let label = traffic.label();
        ensure!(longest <= most, "{label}: {longest} tokens do not fit the context of {name}, which is {most}");
        traffic.check(&shape, &opened.tokens)?;
    }
    let mut facts = opened.facts.clone();
    facts.args.extend(args.serve.iter().cloned());
    let launch =
        Launch { program: program.clone(), args: facts.args.clone(), with_cache_dir: false, patience: LOAD_PATIENCE };
    let state = HostState::now();
    let mut record = LoadRecord {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        incomplete: None,
        program: Program::at(&program)?,
        model: facts,
        devices: Vec::new(),
        host: HostFacts::new(),
        host_start: state.clone(),
        host_end: state,
        shape,
        levels: Vec::new(),
    };
    let stop = stop_flag()?;
    let mut steps = progress::Steps::new();
    for (done, traffic) in levels.iter().enumerate() {
        steps.show(done, levels.len(), &traffic.label());
        let measure = || {
            let server = Server::start(&launch, &stop)?;
            let prompt = opened.tokens.prompt(0, args.prompt_lengths[0] as usize)?;
            let asked = || {
                server.client.complete(&Ask { prompt, generate: 4 })?;
                server.client.get("/troika/status")
            };
            let status = asked().map_err(|error| server.blame(error))?;
            let done = level(&server.client, traffic, &record.shape, &opened.tokens, &stop)?;
            let end = match done.failures.keys().next() {
                Some(why) => server.end_of(why),
                None => None,
            };
            Ok((status, done, end))
        };
        let measured: Result<_, troika_bench::BenchError> = measure();
        match measured {
            Ok((status, done, end)) => {
                let engines = status["hybrid"]["devices"].as_array().into_iter().flatten().skip(1);
                let devices = status["devices"].as_array().into_iter().flatten().chain(engines);
                record.devices = devices.map(|device| device.as_str().unwrap_or_default().to_owned()).collect();
                record.levels.push(done);
                if let Some(end) = end {
                    record.incomplete = Some(end.to_string());
                    break;
                }
            }
            Err(error) => {
                let interrupted = stop.load(Ordering::Relaxed);
                record.incomplete = Some(if interrupted { "interrupted".to_owned() } else { error.to_string() });
                break;
            }
        }
    }
    steps.end();
    record.host_end = HostState::now();
    // The table first: a disk may be full.
    if args.json.as_ref().is_none_or(|path| path.as_os_str() != "-") {
        print(&record.table())?;
    }
    if let Some(path) = &args.json {
        write_record(path, &record)?;
    }
    let num_failed = record.num_failed();
    match record.incomplete {
        Some(_) if stop.load(Ordering::Relaxed) => Ok(ending()),
        Some(why) => bail!("the run is incomplete: {why}"),
        None if num_failed > 0 => bail!("{num_failed} requests failed, so the percentiles are those of the others"),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn levels(args: &Args) -> Result<Vec<Traffic>> {
    let mut levels = Vec::new();
    for per_second in &args.rate {
        ensure!((1e-3..=1e4).contains(per_second), "--rate must lie between 0.001 and 10000, not at {per_second}");
        levels.push(Traffic::Arrivals { per_second: *per_second });
    }
    levels.extend(args.clients.iter().map(|count| Traffic::Clients { count: usize::from(*count) }));
    levels.extend(args.agents.iter().map(|count| Traffic::Agents {
        count: usize::from(*count),
        instructions: args.instructions as usize,
        turns: args.turns as usize,
    }));
    if levels.is_empty() {
        levels = [1, 2, 4].map(|count| Traffic::Clients { count }).to_vec();
    }
    Ok(levels)
}
