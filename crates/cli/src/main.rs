//! The `troika` command. Flags are read here once into plain structs; each command has a file in `commands`.

mod builtin;
mod commands;
mod drafter;
mod hybrid;
mod memory;
mod model_source;
mod plan_file;
mod progress;
mod report;
mod size;
mod tuning;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

const AFTER_HELP: &str = "\
Exit codes: 0 done, 1 failed (the reason is on standard error), 2 wrong usage, 130 interrupted, 143 terminated.
Logs go to standard error; TROIKA_LOG=debug shows more (error, warn, info, debug, trace).";

/// Runs DeepSeek-V4-family language models on this machine.
#[derive(Debug, Parser)]
#[command(name = "troika", version, about, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(commands::run::Args),
    Serve(commands::serve::Args),
    Launch(commands::launch::Args),
    Bench(commands::bench::Args),
    Eval(commands::eval::Args),
    Logits(commands::logits::Args),
    Inspect(commands::inspect::Args),
    Explain(commands::explain::Args),
    Devices(commands::devices::Args),
    Plan(commands::plan::Args),
    Sim(Box<commands::sim::Args>),
    Gate(commands::gate::Args),
    Tune(commands::tune::Args),
    Synth(commands::synth::Args),
    Cache(commands::cache::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("TROIKA_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // Colours are for people; a file or a program gets plain text.
    let is_terminal = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(is_terminal)
        .with_target(false)
        .init();
    let done = match cli.command {
        Command::Run(args) => commands::run::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Launch(args) => commands::launch::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Logits(args) => commands::logits::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Explain(args) => commands::explain::run(&args),
        Command::Devices(args) => commands::devices::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Sim(args) => commands::sim::run(&args),
        Command::Gate(args) => commands::gate::run(&args),
        Command::Tune(args) => commands::tune::run(&args),
        Command::Synth(args) => commands::synth::run(&args),
        Command::Cache(args) => commands::cache::run(&args),
    };
    match done {
        Ok(code) => code,
        // A reader that has seen enough (`troika explain | head`) is no failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("troika: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.into_iter().any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}
