//! The rig of a real machine: `troika serve` with the flags of each arm, asked over HTTP, and `troika gate` for the numbers.
//!
//! While it searches, servers stay up between passes as far as memory allows, one that waits takes no CPU; each sample of the
//! verification has a process of its own.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::file::spelled;
use super::{Arm, Candidate, Gate, KindFacts, Pass, Probe, Rig, Sample};
use crate::BenchError;
use crate::arm::Geometry;
use crate::client::Ask;
use crate::corpus::Tokens;
use crate::evidence::Evidence;
use crate::host::HostState;
use crate::run::{engine_times, request_record};
use crate::server::{LOAD_PATIENCE, Launch, Server, output};
use crate::stats::median;

/// Prompts of one sample in the verification: their median counts.
const REPEATS: usize = 3;
/// Of one prompt that takes longer, one is enough.
const LONG: Duration = Duration::from_secs(5);
/// Most servers at once.
const MAX_SERVERS: usize = 32;

/// How servers are started, and what they are asked.
pub struct Setup {
    /// The `troika` program.
    pub program: PathBuf,
    /// Flags of the model, for `serve` and `gate`.
    pub model: Vec<String>,
    /// As `--npu` takes it.
    pub npu: String,
    pub geometry: Geometry,
    /// Threads of the primary device without engines and beside them, as `--threads` takes them.
    pub threads: [usize; 2],
    pub tokens: Tokens,
    /// Kinds and what they cost by themselves, measured before.
    pub kinds: Vec<(KindFacts, Probe)>,
}

/// See the module.
pub struct Served {
    setup: Setup,
    stop: Arc<AtomicBool>,
    /// Those that are up, by their flags, the one that was used last at the end.
    servers: Vec<(Vec<String>, Server)>,
}

impl Served {
    /// Ends with [`BenchError::Interrupted`] once `stop` is true.
    pub fn new(setup: Setup, stop: Arc<AtomicBool>) -> Self {
        Self { setup, stop, servers: Vec::new() }
    }

    /// Flags of `serve` that an arm has.
    fn args(&self, arm: &Arm) -> Vec<String> {
        let Setup { geometry, threads, .. } = &self.setup;
        let (threads, step) = match arm {
            Arm::Stock => (threads[0], geometry.stock_step),
            Arm::Matched | Arm::Reference => (threads[0], geometry.plan_step),
            Arm::Candidate(candidate) if candidate.kinds.is_empty() => (threads[0], geometry.plan_step),
            Arm::Candidate(_) => (threads[1], geometry.plan_step),
        };
        let mut args: Vec<String> =
            ["--threads", &threads.to_string(), "--chunk", &step.to_string(), "--no-cache"].map(str::to_owned).into();
        if let Arm::Candidate(candidate) = arm {
            args.extend(self.engines(candidate));
            args.extend(["--wavefront".to_owned(), candidate.wavefront.to_string()]);
        }
        args
    }

    /// Flags of `serve` and `gate` for a candidate's engines. Every kind is named, so that nothing is left to be measured.
    fn engines(&self, candidate: &Candidate) -> Vec<String> {
        let Setup { npu, geometry, kinds, .. } = &self.setup;
        if candidate.kinds.is_empty() {
            return Vec::new();
        }
        let place =
            kinds.iter().map(|(facts, _)| format!("{}={}", facts.name, spelled(candidate.placement(&facts.name))));
        let place = place.collect::<Vec<_>>().join(",");
        let (tile, tail) = (geometry.tile.to_string(), candidate.tail.to_string());
        ["--npu", npu, "--hybrid", "on", "--tile", &tile, "--tail", &tail, "--place", &place].map(str::to_owned).into()
    }

    fn check_stop(&self) -> Result<(), BenchError> {
        if self.stop.load(Ordering::Relaxed) { Err(BenchError::Interrupted) } else { Ok(()) }
    }

    /// A server of the arm, and the seconds that it took to load.
    fn server(&mut self, arm: &Arm) -> Result<(Vec<String>, Server, f64), BenchError> {
        let args = self.args(arm);
        if let Some(place) = self.servers.iter().position(|(other, _)| *other == args) {
            let (args, server) = self.servers.remove(place);
            return Ok((args, server, 0.0));
        }
        let all = [self.setup.model.clone(), args.clone()].concat();
        let program = self.setup.program.clone();
        let launch = Launch { program, args: all, with_cache_dir: false, patience: LOAD_PATIENCE };
        let server = Server::start(&launch, &self.stop)?;
        let warm_up = self.setup.tokens.prompt(0, self.setup.geometry.tile * 2 + 1)?;
        server.client.complete(&Ask { prompt: warm_up, generate: 1 }).map_err(|error| server.blame(error))?;
        let load_s = server.load_s;
        Ok((args, server, load_s))
    }

    /// Lets the server live if there is room for another one of its kind.
    fn keep(&mut self, args: Vec<String>, server: Server) {
        let needs = server.peak_memory_bytes();
        let has = HostState::now().available_memory_bytes;
        // Three times: the next one, its load, and room for everybody else.
        let has_room = needs.zip(has).is_some_and(|(needs, has)| 3 * needs < has);
        if has_room && self.servers.len() < MAX_SERVERS {
            self.servers.push((args, server));
        } else if !self.servers.is_empty() {
            self.servers.remove(0);
            if has_room {
                self.servers.push((args, server));
            }
        }
    }

    fn sample(
        &self,
        server: &Server,
        arm: &Arm,
        len: usize,
        repeats: usize,
        load_s: f64,
    ) -> Result<Sample, BenchError> {
        let started = Instant::now();
        let tile = self.setup.geometry.tile;
        let (mut tps, mut evidence, mut digest) = (Vec::new(), Evidence::default(), None);
        for repeat in 0..repeats {
            self.check_stop()?;
            let asked = Instant::now();
            let prompt = self.setup.tokens.prompt(repeat + 1, len)?;
            let answer = server.client.complete(&Ask { prompt, generate: 1 })?;
            tps.push(len as f64 / engine_times(&answer)?.prefill_s);
            match request_record(server, &answer.id) {
                Some(record) => {
                    digest = record["plan"]["digest"].as_str().map(str::to_owned);
                    evidence.add(&Evidence::of_request(&record, len, 0, tile));
                }
                None => evidence.missing += 1,
            }
            if asked.elapsed() > LONG {
                break;
            }
        }
        let has_engines = matches!(arm, Arm::Candidate(candidate) if !candidate.kinds.is_empty());
        let engagement = evidence.engagement();
        let void = (has_engines && !engagement.is_hybrid())
            .then(|| format!("{}: {}", engagement.label(), engagement.reasons().join("; ")));
        let tps = median(&tps).expect("there is a repeat at least");
        Ok(Sample { tps, void, digest, load_s, measure_s: started.elapsed().as_secs_f64() })
    }

    fn arm(&mut self, arm: &Arm, pass: &Pass) -> Result<Vec<Sample>, BenchError> {
        self.check_stop()?;
        if *arm == Arm::Reference {
            return Err(BenchError::Record("no plan is there to compare with".to_owned()));
        }
        if pass.fresh {
            self.servers.clear();
        }
        let (args, server, mut load_s) = self.server(arm)?;
        let repeats = if pass.fresh { REPEATS } else { 1 };
        let mut samples = Vec::new();
        for len in &pass.prompts {
            let sample = self.sample(&server, arm, *len, repeats, std::mem::take(&mut load_s));
            samples.push(sample.map_err(|error| server.blame(error))?);
        }
        if !pass.fresh {
            self.keep(args, server);
        }
        Ok(samples)
    }
}

impl Rig for Served {
    fn kinds(&self) -> Vec<KindFacts> {
        self.setup.kinds.iter().map(|(facts, _)| facts.clone()).collect()
    }

    fn probe(&mut self, kind: &str) -> Result<Probe, BenchError> {
        let found = self.setup.kinds.iter().find(|(facts, _)| facts.name == kind);
        found.map(|(_, probe)| probe.clone()).ok_or_else(|| BenchError::Record(format!("there is no kind {kind}")))
    }

    fn pass(&mut self, pass: &Pass) -> Result<Vec<Vec<Sample>>, BenchError> {
        let mut order: Vec<usize> = (0..pass.arms.len()).collect();
        if pass.reversed {
            order.reverse();
        }
        let mut samples = vec![Vec::new(); pass.arms.len()];
        for index in order {
            // A signal goes to the servers as well, which then fail first.
            samples[index] = self.arm(&pass.arms[index], pass).map_err(|error| match self.check_stop() {
                Err(interrupted) => interrupted,
                Ok(()) => error,
            })?;
        }
        Ok(samples)
    }

    fn gate(&mut self, candidate: &Candidate) -> Result<Gate, BenchError> {
        self.check_stop()?;
        let mut args = [self.setup.model.clone(), self.engines(candidate)].concat();
        args.extend(["--threads".to_owned(), self.setup.threads[1].to_string()]);
        let mut command = Command::new(&self.setup.program);
        command.arg("gate").args(&args).args(["--json", "-"]);
        let output =
            output(&mut command).map_err(|source| BenchError::Start { program: self.setup.program.clone(), source })?;
        self.check_stop()?;
        // A gate that is not passed ends with an error and says why in its report.
        let report: Value = serde_json::from_slice(&output.stdout).map_err(|_| BenchError::Server {
            args: args.join(" "),
            why: format!("did not compare (`gate`, {})", output.status),
            log: format!("\n{}", String::from_utf8_lossy(&output.stderr)),
        })?;
        let failures: Vec<String> =
            report["failures"].as_array().into_iter().flatten().filter_map(|f| f.as_str().map(str::to_owned)).collect();
        if !failures.is_empty() {
            return Ok(Gate::Failed { reasons: failures });
        }
        let distance = &report["distance"];
        let number = |name: &str| distance[name].as_f64().unwrap_or(f64::NAN);
        Ok(Gate::Passed {
            summary: format!(
                "mean KL {:.1e}, same most likely token {:.2} %, same experts {:.2} %",
                number("kl") / number("positions"),
                number("clear_same") / number("clear") * 100.0,
                number("experts_same") / number("experts") * 100.0
            ),
        })
    }
}
