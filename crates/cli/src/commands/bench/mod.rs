//! `troika bench`: its flags, and who does the work.

mod compare;
mod cross_check;
mod in_process;
mod load;
mod matrix;
mod rerender;
pub(super) mod subject;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use anyhow::{Context, Result};

/// Measure prompt and generation speed, and whether a feature makes a difference.
///
/// Three arms take turns, each in a server process of its own: A, the primary device as it is served; B, the same with the
/// chunks that the feature needs; C, the feature. What B gains over A is geometry, what C gains over B is the feature. The
/// word hybrid is only used where everything that was planned really ran. docs/benchmarks.md says how to read a report.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(flatten)]
    matrix: matrix::Args,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Compare(compare::Args),
    Report(rerender::Args),
    Load(load::Args),
    InProcess(in_process::Args),
    CrossCheck(cross_check::Args),
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        None => matrix::run(&args.matrix),
        Some(Command::Compare(args)) => compare::run(args),
        Some(Command::Report(args)) => rerender::run(args),
        Some(Command::Load(args)) => load::run(args),
        Some(Command::InProcess(args)) => in_process::run(args),
        Some(Command::CrossCheck(args)) => cross_check::run(args),
    }
}

/// The exit code of the signal that came, which [`stop_flag`] noted.
static ENDING: AtomicU8 = AtomicU8::new(130);

/// How a command ends that was asked to.
pub(super) fn ending() -> ExitCode {
    ExitCode::from(ENDING.load(Ordering::Relaxed))
}

/// Becomes true at the first Ctrl-C or SIGTERM; the second ends the process, and its servers with it.
pub(super) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (listening, listens) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.block_on(async {
            let mut first = std::pin::pin!(super::serve::terminated());
            // It listens from when it was polled, and nothing is started before.
            let at_once = tokio::select! {
                biased;
                signal = &mut first => Some(signal),
                () = std::future::ready(()) => None,
            };
            let _ = listening.send(());
            let signal = match at_once {
                Some(signal) => signal,
                None => first.await,
            };
            if let Ok(signal) = signal {
                ENDING.store(signal.code(), Ordering::Relaxed);
                flag.store(true, Ordering::Relaxed);
                eprintln!("ending: what was measured so far is kept; a second signal ends at once");
                if let Ok(second) = super::serve::terminated().await {
                    troika_bench::server::end_all();
                    std::process::exit(second.code().into());
                }
            }
        });
    });
    listens.recv().context("nobody listens for signals")?;
    Ok(stop)
}
