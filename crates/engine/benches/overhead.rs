//! What the executor costs: a step through it against the same nodes handed to the device in one go, in turn.
//!
//! `cargo bench -p troika-engine --bench overhead [-- MODEL_DIR ...]`; without a folder, the built-in model nano. Medians of
//! one prefill step of 512 tokens and of decode steps after it, in class `fast`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use troika_base::{NumericClass, SequenceId, StepId};
use troika_device::cpu::{CpuDevice, CpuOptions};
use troika_device::run::BufferPool;
use troika_device::{Device, Priority, SequenceState, StateShape, StepRun, Work, map_file};
use troika_engine::{Runner, RunnerOptions, StepRunner};
use troika_graph::{Acceptance, NodeId, Segment, StepRows};
use troika_model::{Checkpoint, Emitter, ScaleCheck, StepSignature, WeightTable};
use troika_runtime::{Executor, Lane, Plan, Step, Template};

const CLASS: NumericClass = NumericClass::Fast;
const PROMPT: usize = 512;
const PREFILL_ROUNDS: usize = 16;
const DECODE_ROUNDS: usize = 300;

fn main() {
    let mut dirs: Vec<PathBuf> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).map(PathBuf::from).collect();
    if dirs.is_empty() {
        dirs.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano"));
    }
    println!("{:<24}{:>14}{:>18}{:>12}", "median us per step", "executor", "straight line", "overhead");
    for dir in dirs {
        let bench = Bench::open(&dir);
        let name = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        for (what, rows, rounds) in [("prefill", PROMPT, PREFILL_ROUNDS), ("decode", 1, DECODE_ROUNDS)] {
            let [executor, straight] = bench.measure(rows, rounds);
            let overhead = (executor / straight - 1.0) * 100.0;
            println!("{:<24}{executor:>14.1}{straight:>18.1}{overhead:>10.2} %", format!("{name} {what} {rows}"));
        }
    }
}

struct Bench {
    device: Arc<CpuDevice>,
    emitter: Emitter,
    shape: StateShape,
}

impl Bench {
    fn open(dir: &Path) -> Self {
        let checkpoint = Checkpoint::open(dir, &map_file).expect("the checkpoint opens");
        let weights = WeightTable::build(&checkpoint, ScaleCheck::Skip).expect("it is complete");
        let config = checkpoint.config().model.clone();
        let runner = Runner::new(config.clone(), weights.facts(), &weights, RunnerOptions::new(CLASS));
        let shape = runner.expect("the model loads").state_shape().clone();
        let device = Arc::new(CpuDevice::start(CpuOptions::default(), CLASS).expect("threads start"));
        device.load(&weights).expect("the device takes the model");
        Self { device, emitter: Emitter::new(config, weights.facts()), shape }
    }

    /// Median microseconds of steps of `rows` tokens, through the executor and in a straight line. Decode steps follow a
    /// prompt; each prefill step is a new sequence.
    fn measure(&self, rows: usize, rounds: usize) -> [f64; 2] {
        let mut executor = Executor::new(vec![Arc::clone(&self.device) as Arc<dyn Device>], Plan::primary());
        let template = |rows| {
            let select = self.emitter.needs_selection(PROMPT + DECODE_ROUNDS);
            let (draft_context, debug_blocks) = (false, None);
            let signature = StepSignature { rows, logit_rows: 1, select, class: CLASS, draft_context, debug_blocks };
            executor.template(self.emitter.trunk(&signature), Lane::Prefill)
        };
        let (prompt, template) = (template(PROMPT), template(rows));
        let pool = BufferPool::default();
        let fresh = || [0, 1].map(|_| Arc::new(SequenceState::new(&self.shape)));
        let mut states = fresh();
        if rows < PROMPT {
            states.iter().for_each(|state| self.straight(&prompt, state, &pool));
        }
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            if rows == PROMPT {
                states = fresh();
            }
            // Whoever comes second finds other things in the caches, so each does so half of the time.
            for arm in [round % 2, 1 - round % 2] {
                let start = Instant::now();
                match arm {
                    0 => through_executor(&mut executor, &template, &states[0]),
                    _ => self.straight(&template, &states[1], &pool),
                }
                times[arm].push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
    }

    fn straight(&self, template: &Template, state: &Arc<SequenceState>, pool: &BufferPool) {
        let graph = template.graph();
        let (states, rows) = (vec![Arc::clone(state)], rows(graph.num_rows(), state.len()));
        let run = Arc::new(StepRun::new(StepId(0), Arc::clone(graph), rows, states, pool));
        let nodes = (0..graph.nodes().len() as u32).map(NodeId).collect();
        let (done, reports) = channel();
        let work = Work { run: Arc::clone(&run), nodes, part: None, priority: Priority::Decode, feeds: false, done };
        self.device.submit(work).expect("it takes work");
        assert!(self.device.drive(&mut |_| false), "there is work");
        assert_eq!(reports.recv().expect("it reports").failure, None);
        state.commit(graph.num_rows());
        Arc::into_inner(run).expect("nobody else has it").recycle(pool);
    }
}

fn through_executor(executor: &mut Executor, template: &Arc<Template>, state: &Arc<SequenceState>) {
    let num_rows = template.graph().num_rows();
    let step = Step {
        template: Arc::clone(template),
        rows: rows(num_rows, state.len()),
        states: vec![Arc::clone(state)],
        priority: Priority::Decode,
    };
    executor.submit(step).expect("it takes the step");
    let finished = executor.next_done().expect("nothing fails");
    state.commit(num_rows);
    executor.recycle(finished.run);
}

fn rows(count: usize, position: usize) -> StepRows {
    let segment = Segment { sequence: SequenceId(0), row: 0, rows: count, position, acceptance: Acceptance::Whole };
    let tokens = (position..position + count).map(|at| (at * 7919 % 256) as i32).collect();
    StepRows { tokens, segments: vec![segment], logit_rows: vec![count - 1] }
}
