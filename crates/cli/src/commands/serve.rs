//! `troika serve`: the HTTP server.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use tokio::net::TcpListener;
use troika_base::NumericClass;
use troika_engine::api::Generator;
use troika_engine::{DiskTier, Engine, EngineOptions};
use troika_kvstore::Store;
use troika_server::{Access, Limits, SamplingDefaults, ServerState};

use crate::drafter::DrafterArgs;
use crate::hybrid::{HybridArgs, WavefrontArgs};
use crate::memory::{self, MemoryArgs};
use crate::model_source::{ModelArgs, OpenModel};
use crate::size::Size;
use crate::tuning::TuningArgs;

/// Serve a model over HTTP, compatible with OpenAI's and Anthropic's clients.
///
/// Routes: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /health, /metrics,
/// /troika/requests/ID, /openapi.json, and a web page at /. Ctrl-C or SIGTERM lets running answers finish for a few seconds and
/// exits with 0; a second signal ends at once.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hybrid: HybridArgs,
    #[command(flatten)]
    wavefront: WavefrontArgs,
    #[command(flatten)]
    tuning: TuningArgs,
    #[command(flatten)]
    drafter: DrafterArgs,
    /// Address to listen on. Addresses that other machines can reach need an API key.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: IpAddr,
    /// Port to listen on; 0 = any free one.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Most tokens of a prompt and its answer; 0 = the model's limit.
    #[arg(long, default_value_t = 0, value_name = "N")]
    max_context: usize,
    /// Prompt tokens computed in one step; by default 512, or a tile where engines take part and it has more rows.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: Option<u32>,
    /// Requests computed at once; others wait.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_running: u32,
    /// Requests that may wait; more are refused with status 429.
    #[arg(long, default_value_t = 256, value_name = "N")]
    max_queued: usize,
    /// Key that requests must carry, as `Authorization: Bearer KEY` or `x-api-key: KEY`; may be given several times. Others
    /// on this machine may see a command line: a variable or a file is better.
    #[arg(long, value_name = "KEY", env = "TROIKA_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// More keys, separated by commas.
    #[arg(long, value_name = "KEYS", env = "TROIKA_API_KEYS", hide_env_values = true, value_delimiter = ',')]
    api_keys: Vec<String>,
    /// File with a key on each line; empty lines and those that begin with # do not count.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Origin of a web page that may use the server, such as http://localhost:3000; may be given several times. Without it
    /// no other page may.
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Megabytes that request bodies may take together while they are read.
    #[arg(long, default_value_t = 64, value_name = "MB", value_parser = clap::value_parser!(u32).range(16..=65536))]
    max_body_memory: u32,
    /// Longest gap between the tokens of a running answer while prompts are computed, in milliseconds; a machine that cannot
    /// keep it gives prompts a third of its time.
    #[arg(long, default_value_t = 200, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    max_itl: u32,
    /// Memory for prefixes that need not be computed again, e.g. 512M or 4G.
    #[arg(long, default_value = "1G", value_name = "SIZE")]
    cache_ram_limit: Size,
    /// Folder in which prefixes are also kept on disk; without it they are gone at the next start. One process at a time.
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Most bytes under --cache-dir, whatever else lies there included.
    #[arg(long, default_value = "16G", value_name = "SIZE")]
    cache_disk_limit: Size,
    /// Keep no prefixes, neither in memory nor on disk.
    #[arg(long)]
    no_cache: bool,
    /// Let prompts that came with one key use the kept prefixes of others'. Without it, several keys share nothing.
    #[arg(long)]
    share_between_keys: bool,
    #[command(flatten)]
    memory: MemoryArgs,
    /// End when standard input closes: then `troika bench`, which started it, is gone.
    #[arg(long, hide = true)]
    end_with_input: bool,
}

/// Prompt tokens computed in one step unless somebody says otherwise.
const CHUNK: u32 = 512;

/// The tier on disk if one is wanted, and why it is not there if it cannot be had.
fn disk_tier(args: &Args, model: &OpenModel) -> Result<(Option<DiskTier>, Option<String>)> {
    let Some(dir) = args.cache_dir.as_ref().filter(|_| !args.no_cache) else { return Ok((None, None)) };
    let [weights, tokenizer] = model.digests()?;
    match Store::open(dir, args.cache_disk_limit.0) {
        Ok((store, items)) => Ok((Some(DiskTier { store, items, weights, tokenizer }), None)),
        Err(error) => {
            let reason = format!("no prefixes are kept on disk: {error}");
            tracing::warn!("{reason}");
            Ok((None, Some(reason)))
        }
    }
}

/// A signal that asks the process to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Interrupt,
    Terminate,
}

impl Signal {
    /// By convention, 128 plus the signal's number.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }

    pub(crate) fn exit_code(self) -> ExitCode {
        ExitCode::from(self.code())
    }
}

/// Completes when the process is asked to end.
pub(crate) async fn terminated() -> Result<Signal> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        tokio::select! {
            interrupt = tokio::signal::ctrl_c() => interrupt.map(|()| Signal::Interrupt).context("cannot listen for Ctrl-C"),
            _ = terminate.recv() => Ok(Signal::Terminate),
        }
    }
    #[cfg(not(unix))]
    {
        tokio::signal::ctrl_c().await.map(|()| Signal::Interrupt).context("cannot listen for Ctrl-C")
    }
}

impl Args {
    /// Who may use the server. Errors name the file, never a key.
    fn access(&self) -> Result<Access> {
        let file = match &self.api_key_file {
            None => String::new(),
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
                ensure!(keys(&text).next().is_some(), "{} has no key", path.display());
                text
            }
        };
        let given = self.api_key.iter().chain(&self.api_keys).map(String::as_str);
        let access = Access::new(given.chain(keys(&file)), self.cors_origin.iter().map(String::as_str))?;
        Ok(if self.share_between_keys { access.shared_between_keys() } else { access })
    }
}

fn keys(file: &str) -> impl Iterator<Item = &str> {
    file.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

#[tokio::main]
pub(crate) async fn run(args: &Args) -> Result<ExitCode> {
    if args.end_with_input {
        std::thread::spawn(|| {
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            std::process::exit(0);
        });
    }
    let access = args.access()?;
    ensure!(
        args.host.is_loopback() || access.needs_key(),
        "--host {}: this address can be reached from other machines, so it needs a key: give --api-key KEY or \
         --api-key-file FILE, or use 127.0.0.1",
        args.host
    );
    let class = args.model.class_or(NumericClass::Fast);
    let model = args.model.open()?;
    let tokenizer = model.tokenizer()?;
    let (temperature, top_p) = model.sampling_advice()?;
    let limit = model.config.model.max_position_embeddings;
    let max_context_tokens = if args.max_context == 0 { limit } else { args.max_context.min(limit) };
    let mut runner_options = args.model.runner_options(class);
    args.drafter.apply(&model, &mut runner_options)?;
    let (hybrid, wavefront) = args.tuning.apply(&model, &runner_options, &args.hybrid, args.wavefront.steps())?;
    let cache_bytes = if args.no_cache { 0 } else { args.cache_ram_limit.0 };
    let options = EngineOptions {
        chunk_tokens: args.chunk.unwrap_or(CHUNK) as usize,
        honour_chunk: args.chunk.is_some(),
        wavefront: 1,
        max_running: args.max_running as usize,
        max_queued: args.max_queued,
        max_context_tokens,
        max_itl: Duration::from_millis(args.max_itl.into()),
        memory_bytes: args.memory.resolve(model.weights_bytes(), cache_bytes),
        cache_bytes,
        snapshot_spacing: EngineOptions::DEFAULT_SNAPSHOT_SPACING,
    };
    // The port first: whoever waits for a large model should not learn at the end that it is taken.
    let address = SocketAddr::new(args.host, args.port);
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
    let (runner, wavefront) = model.hybrid_runner(runner_options, &hybrid, wavefront, args.memory.of_engines())?;
    let options = EngineOptions { wavefront, ..options };
    let (device, numeric_class) = (runner.device_description().to_owned(), runner.numeric_class());
    let (disk, degraded) = disk_tier(args, &model)?;
    let engine = Arc::new(Engine::start_with_disk(runner, options, disk)?);
    memory::report(&engine)?;
    hybrid.check_reachable(engine.status().hybrid.as_ref())?;
    if access.isolates_keys() {
        tracing::info!(
            "each key has its own prefixes and sees its own requests; --share-between-keys would share them"
        );
    }
    let state = ServerState {
        generator: Arc::clone(&engine) as Arc<dyn Generator>,
        tokenizer,
        texts: Arc::new(model.texts()),
        model_id: model.name.clone(),
        created_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
        defaults: SamplingDefaults { temperature, top_p },
        max_context_tokens,
        stop_tokens: model.config.eos_token_ids.clone(),
        numeric_class,
        devices: vec![device.clone()],
        degraded,
        access,
        limits: Limits { max_bodies_bytes: (args.max_body_memory as usize) << 20, ..Limits::default() },
    };
    tracing::info!(model = model.name, %class, device, "serving http://{}", listener.local_addr()?);
    let (told, mut shutdown) = tokio::sync::watch::channel(false);
    let watcher = tokio::spawn(async move {
        if terminated().await.is_ok() {
            tracing::info!("ending: running answers may finish; a second signal ends at once");
            told.send_replace(true);
            if let Ok(second) = terminated().await {
                std::process::exit(if second == Signal::Interrupt { 130 } else { 143 });
            }
        }
    });
    troika_server::serve(listener, state, async move {
        let _ = shutdown.wait_for(|told| *told).await;
    })
    .await?;
    tokio::task::spawn_blocking(move || engine.shutdown()).await?;
    // Not before: a second signal also ends the wait for a slow disk.
    watcher.abort();
    Ok(ExitCode::SUCCESS)
}
