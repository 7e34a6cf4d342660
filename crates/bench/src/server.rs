//! One server process: started for one arm and one round, asked over HTTP, and ended. Whatever ends the benchmark, none is left
//! behind: servers are dropped, or ended by [`end_all`], and end by themselves when their standard input closes.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::BenchError;
use crate::client::Client;
use crate::host;

/// Lines of its log that an error quotes.
const LOG_LINES: usize = 12;
/// While a server loads, so often is looked whether to go on.
const GLANCE: Duration = Duration::from_millis(100);
/// After a connection broke, so long for the process to be gone too.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// Processes that run.
static RUNNING: Mutex<Vec<Weak<Mutex<Process>>>> = Mutex::new(Vec::new());

/// Ends all servers and removes their folders, for whoever is about to end this process without unwinding.
pub fn end_all() {
    // Not let go of: a server that is being started must not outlive this.
    let running = std::mem::ManuallyDrop::new(lock(&RUNNING));
    running.iter().filter_map(Weak::upgrade).for_each(|process| lock(&process).end());
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a command says until it ends, which [`end_all`] sees to as well.
pub(crate) fn output(command: &mut Command) -> std::io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (process, (mut out, mut err)) = Process::spawn(command, None, |child| {
        (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"))
    })?;
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        err.read_to_end(&mut text).map(|_| text)
    });
    let mut stdout = Vec::new();
    out.read_to_end(&mut stdout)?;
    let stderr = reader.join().expect("reading does not panic")?;
    let status = lock(&process).child.wait()?;
    Ok(Output { status, stdout, stderr })
}

/// A child and the folder that it was given.
struct Process {
    child: Child,
    cache_dir: Option<TempDir>,
}

impl Process {
    /// Starts it, known to [`end_all`]; `take` is given the child before anybody else has it.
    fn spawn<T>(
        command: &mut Command,
        cache_dir: Option<TempDir>,
        take: impl FnOnce(&mut Child) -> T,
    ) -> std::io::Result<(Arc<Mutex<Self>>, T)> {
        let mut running = lock(&RUNNING);
        let mut child = command.spawn()?;
        let taken = take(&mut child);
        let process = Arc::new(Mutex::new(Self { child, cache_dir }));
        running.retain(|process| process.strong_count() > 0);
        running.push(Arc::downgrade(&process));
        Ok((process, taken))
    }

    /// It keeps nothing that the next one may see, so there is nothing to say goodbye to.
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.cache_dir = None;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// What a server said.
#[derive(Debug, Default)]
struct Log {
    /// The last lines.
    lines: VecDeque<String>,
    /// The newest warning: with a line for each request, it is soon not among the last.
    warning: Option<String>,
}

/// Loading and compiling may take so long.
pub const LOAD_PATIENCE: Duration = Duration::from_secs(1800);

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
    process: Arc<Mutex<Process>>,
    pid: u32,
    pub client: Client,
    /// From the start of the process until it answered: loading, packing, compiling.
    pub load_s: f64,
    args: String,
    log: Arc<Mutex<Log>>,
}

impl Server {
    /// Starts a process and waits until it listens, or `stop` becomes true.
    ///
    /// # Errors
    ///
    /// If it cannot be started, ends or says nothing in time; the error has the end of its log.
    pub fn start(launch: &Launch, stop: &AtomicBool) -> Result<Self, BenchError> {
        let started = Instant::now();
        let cache_dir = launch.with_cache_dir.then(tempfile::tempdir).transpose().map_err(BenchError::CacheDir)?;
        let mut command = Command::new(&launch.program);
        command.arg("serve").args(&launch.args).args(["--port", "0", "--end-with-input"]);
        if let Some(dir) = &cache_dir {
            command.arg("--cache-dir").arg(dir.path());
        }
        // The harness needs no key and reads the log.
        for name in ["TROIKA_API_KEY", "TROIKA_API_KEYS"] {
            command.env_remove(name);
        }
        command.env("TROIKA_LOG", "info").env("NO_COLOR", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started_it =
            Process::spawn(&mut command, cache_dir, |child| (child.id(), child.stderr.take().expect("it is piped")));
        let (process, (pid, stderr)) =
            started_it.map_err(|source| BenchError::Start { program: launch.program.clone(), source })?;
        let (log, args) = (Arc::default(), launch.args.join(" "));
        let (found, address) = channel();
        let lines = Arc::clone(&log);
        std::thread::spawn(move || follow(BufReader::new(stderr), &lines, &found));
        let address = loop {
            match address.recv_timeout(GLANCE) {
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => return Err(BenchError::Interrupted),
                Err(RecvTimeoutError::Timeout) if started.elapsed() < launch.patience => {}
                said => break said,
            }
        };
        let address = match address {
            Ok(address) => address,
            Err(error) => {
                let mut process = lock(&process);
                let why = match (error, process.child.try_wait()) {
                    (RecvTimeoutError::Timeout, _) => format!("said nothing for {} s", launch.patience.as_secs()),
                    (_, Ok(Some(status))) => format!("ended with {status}"),
                    // Its log is closed, so it is about to.
                    _ => process.child.wait().map_or("ended".to_owned(), |status| format!("ended with {status}")),
                };
                return Err(BenchError::Server { args, why, log: lock(&log).tail() });
            }
        };
        let mut server = Self { process, pid, client: Client::new(&address), load_s: 0.0, args, log };
        // It listens, and may still end before it answers.
        while let Err(error) = server.client.get("/health") {
            if stop.load(Ordering::Relaxed) {
                return Err(BenchError::Interrupted);
            }
            if server.ended().is_some() || started.elapsed() >= launch.patience {
                return Err(server.blame(error));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        server.load_s = started.elapsed().as_secs_f64();
        Ok(server)
    }

    /// How the process ended, if it did.
    pub fn ended(&self) -> Option<ExitStatus> {
        lock(&self.process).child.try_wait().ok().flatten()
    }

    /// That the process has ended, if it has, after a request failed for the reason `why`.
    pub fn end_of(&self, why: &str) -> Option<BenchError> {
        let failed = BenchError::Http { path: "/v1/completions".to_owned(), why: why.to_owned() };
        Some(self.blame(failed)).filter(|error| matches!(error, BenchError::Server { .. }))
    }

    /// What is behind `error`, which came of asking it: that the process has ended, if it has, and what it said last.
    pub fn blame(&self, error: BenchError) -> BenchError {
        if !matches!(error, BenchError::Http { .. }) {
            return error;
        }
        // Its connections close before it can be waited for.
        let since = Instant::now();
        while since.elapsed() < LAST_BREATH {
            if let Some(status) = self.ended() {
                let why = format!("ended with {status} while it was asked ({error})");
                return BenchError::Server { args: self.args.clone(), why, log: lock(&self.log).tail() };
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        error
    }

    /// Number of the process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Most memory it ever had resident, where the system tells.
    pub fn peak_memory_bytes(&self) -> Option<u64> {
        host::peak_memory_bytes(self.pid)
    }

    /// Whether it has warned of anything since it was started, such as that the feature does not run as asked. The newest warning.
    pub fn warning(&self) -> Option<String> {
        lock(&self.log).warning.clone()
    }
}

/// Keeps the end of the log, and says where the server listens.
fn follow(mut log: impl BufRead, kept: &Mutex<Log>, found: &Sender<String>) {
    let mut bytes = Vec::new();
    // Names of files need not be UTF-8, and a log that nobody reads would stop the server.
    while log.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        bytes.clear();
        let rest = line.split_once("serving http://").map(|(_, rest)| rest);
        let address = rest.map(|rest| rest.split_whitespace().next().unwrap_or_default().to_owned());
        lock(kept).push(line);
        if let Some(address) = address {
            // Nobody waits any more if the start was given up.
            let _ = found.send(address);
        }
    }
}

impl Log {
    fn push(&mut self, line: String) {
        if let Some((_, warning)) = line.split_once(" WARN ") {
            self.warning = Some(warning.trim().to_owned());
        }
        if self.lines.len() == LOG_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    fn tail(&self) -> String {
        self.lines.iter().map(|line| format!("\n  {line}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that ends after it has said where it listens is not waited for.
    #[test]
    #[cfg(unix)]
    fn a_server_that_ends_before_it_answers_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("server");
        // Nobody listens at port 9.
        std::fs::write(&program, "#!/bin/sh\necho 'serving http://127.0.0.1:9 now' >&2\nexit 3\n").expect("written");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).expect("it is ours");
        let patience = Duration::from_secs(3600);
        let launch = Launch { program, args: vec!["--it".to_owned()], with_cache_dir: true, patience };
        let Err(BenchError::Server { args, why, log }) = Server::start(&launch, &AtomicBool::new(false)) else {
            panic!("it does not run");
        };
        assert_eq!((args.as_str(), log.as_str()), ("--it", "\n  serving http://127.0.0.1:9 now"));
        assert!(why.starts_with("ended with exit status: 3 while it was asked"), "{why}");
    }

    #[test]
    fn a_warning_is_kept_however_much_is_logged_after_it() {
        let (found, address) = channel();
        let kept = Mutex::default();
        let mut text = b"t  WARN steps of 256 cannot hold a tile\nt  INFO serving http://127.0.0.1:7 now\n".to_vec();
        text.extend_from_slice(b"t  INFO no UTF-8: \xff\n");
        (0..40).for_each(|request| text.extend_from_slice(format!("t  INFO request {request}\n").as_bytes()));
        follow(text.as_slice(), &kept, &found);
        assert_eq!(address.recv().as_deref(), Ok("127.0.0.1:7"));
        let log = lock(&kept);
        assert_eq!(log.warning.as_deref(), Some("steps of 256 cannot hold a tile"));
        assert_eq!((log.lines.len(), log.lines.back().map(String::as_str)), (LOG_LINES, Some("t  INFO request 39")));
        assert!(log.tail().starts_with("\n  t  INFO request 28\n"), "{}", log.tail());
    }
}
