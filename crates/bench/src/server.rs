//! One server process: started for one arm and one round, asked over HTTP, and ended.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::BenchError;
use crate::client::Client;
use crate::host;

/// Lines of its log that an error quotes.
const LOG_LINES: usize = 12;

/// How to start a server.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program; `serve` is its first argument.
    pub program: PathBuf,
    pub args: Vec<String>,
    /// It is given an empty folder for its prefixes on disk.
    pub with_cache_dir: bool,
    /// Loading and compiling may take so long.
    pub patience: Duration,
}

/// A server that answers. Dropping it ends the process.
pub struct Server {
    child: Child,
    pub client: Client,
    /// From the start of the process until it answered: loading, packing, compiling.
    pub load_s: f64,
    log: Arc<Mutex<VecDeque<String>>>,
    _cache_dir: Option<TempDir>,
}

impl Server {
    /// Starts a process and waits until it listens.
    ///
    /// # Errors
    ///
    /// If it cannot be started, ends or says nothing in time; the error has the end of its log.
    pub fn start(launch: &Launch) -> Result<Self, BenchError> {
        let started = Instant::now();
        let cache_dir = launch.with_cache_dir.then(tempfile::tempdir).transpose().map_err(BenchError::CacheDir)?;
        let mut command = Command::new(&launch.program);
        command.arg("serve").args(&launch.args).args(["--port", "0"]);
        if let Some(dir) = &cache_dir {
            command.arg("--cache-dir").arg(dir.path());
        }
        // The harness needs no key and reads the log.
        for name in ["TROIKA_API_KEY", "TROIKA_API_KEYS"] {
            command.env_remove(name);
        }
        command.env("TROIKA_LOG", "info").env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child =
            command.spawn().map_err(|source| BenchError::Start { program: launch.program.clone(), source })?;
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let (found, address) = channel();
        let stderr = child.stderr.take().expect("it is piped");
        let lines = Arc::clone(&log);
        std::thread::spawn(move || follow(BufReader::new(stderr), &lines, &found));
        let wait = launch.patience.saturating_sub(started.elapsed());
        let address = match address.recv_timeout(wait) {
            Ok(address) => address,
            Err(error) => {
                // Whatever ends it, it must not be left behind.
                let _ = child.kill();
                let status = child.wait().ok();
                let why = match (error, status) {
                    (RecvTimeoutError::Timeout, _) => format!("said nothing for {} s", launch.patience.as_secs()),
                    (_, Some(status)) => format!("ended with {status}"),
                    (_, None) => "ended".to_owned(),
                };
                return Err(BenchError::Server { args: launch.args.join(" "), why, log: tail(&log) });
            }
        };
        let mut server = Self { child, client: Client::new(&address), load_s: 0.0, log, _cache_dir: cache_dir };
        server.client.wait_until_healthy(launch.patience)?;
        server.load_s = started.elapsed().as_secs_f64();
        Ok(server)
    }

    /// Number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Most memory it ever had resident, where the system tells.
    pub fn peak_memory_bytes(&self) -> Option<u64> {
        host::peak_memory_bytes(self.pid())
    }

    /// Whether it has warned that the feature does not run as asked, and how. The newest such line.
    pub fn warning(&self) -> Option<String> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().rev().find(|line| line.contains("WARN")).cloned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It keeps nothing that the next one may see, so there is nothing to say goodbye to.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Keeps the end of the log, and says where the server listens.
fn follow(log: impl BufRead, lines: &Mutex<VecDeque<String>>, found: &Sender<String>) {
    for line in log.lines().map_while(Result::ok) {
        if let Some((_, rest)) = line.split_once("serving http://") {
            let address = rest.split_whitespace().next().unwrap_or_default();
            // Nobody waits any more if the start was given up.
            let _ = found.send(address.to_owned());
        }
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == LOG_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

fn tail(log: &Mutex<VecDeque<String>>) -> String {
    let lines = log.lock().unwrap_or_else(PoisonError::into_inner);
    lines.iter().map(|line| format!("\n  {line}")).collect()
}
