//! Opening the oracle's checkpoints and feeding them.

use std::path::Path;

use troika_base::{NumericClass, SequenceId};
use troika_device::map_file;
use troika_engine::{Chunk, Forward, Runner, RunnerOptions, WantLogits};
use troika_graph::Acceptance;
use troika_model::{Checkpoint, ModelConfig, ScaleCheck, WeightTable};
use troika_testkit::oracle_dir;

/// The three layouts of the oracle's model, which hold identical values.
pub(crate) const CHECKPOINTS: [&str; 3] = ["tiny", "tiny-bf16", "tiny-mlx"];

/// Classes whose row contract is tested: `official` runs the kernels of `exact`.
pub(crate) const CLASSES: [NumericClass; 3] = [NumericClass::Exact, NumericClass::Fast, NumericClass::FastFp8Exact];

pub(crate) fn options() -> RunnerOptions {
    options_for(NumericClass::Exact)
}

pub(crate) fn options_for(class: NumericClass) -> RunnerOptions {
    let mut options = RunnerOptions::new(class);
    options.cpu.threads = 2;
    options
}

/// A checkpoint of the oracle.
pub(crate) fn checkpoint(name: &str) -> (ModelConfig, WeightTable) {
    checkpoint_in(&oracle_dir().join(name))
}

fn checkpoint_in(dir: &Path) -> (ModelConfig, WeightTable) {
    let checkpoint = Checkpoint::open(dir, &map_file).expect("the checkpoint opens");
    let weights = WeightTable::build(&checkpoint, ScaleCheck::All).expect("it is complete");
    (checkpoint.config().model.clone(), weights)
}

pub(crate) fn open(name: &str, options: RunnerOptions) -> Runner {
    open_path(&oracle_dir().join(name), options)
}

/// Any checkpoint.
pub(crate) fn open_path(dir: &Path, options: RunnerOptions) -> Runner {
    let (config, weights) = checkpoint_in(dir);
    Runner::new(config, weights.facts(), &weights, options).expect("the model loads")
}

/// One chunk of one sequence, all rows kept.
pub(crate) fn feed(runner: &mut Runner, sequence: SequenceId, tokens: &[u32], logits: usize) -> Forward {
    let chunk = Chunk { sequence, tokens, logits: WantLogits::Last(logits), acceptance: Acceptance::Whole };
    runner.forward(&[chunk]).expect("the step runs")
}

/// Logits of the last `last` of `tokens`, computed in one step.
pub(crate) fn one_shot(runner: &mut Runner, tokens: &[u32], last: usize) -> Vec<f32> {
    let sequence = runner.new_sequence();
    let logits = feed(runner, sequence, tokens, last).logits(0);
    runner.drop_sequence(sequence);
    logits
}

/// Logits of all `tokens`, fed in chunks of `sizes`, repeated.
pub(crate) fn chunked(runner: &mut Runner, tokens: &[u32], sizes: &[usize]) -> Vec<f32> {
    let sequence = runner.new_sequence();
    let mut logits = Vec::new();
    let mut rest = tokens;
    for size in sizes.iter().cycle() {
        let (chunk, left) = rest.split_at((*size).min(rest.len()));
        logits.extend(feed(runner, sequence, chunk, chunk.len()).logits(0));
        rest = left;
        if rest.is_empty() {
            break;
        }
    }
    runner.drop_sequence(sequence);
    logits
}

/// The rows of `values [rows, cols]` that the golden file keeps.
pub(crate) fn kept_rows(values: &[f32], cols: usize, rows: &[i64]) -> Vec<f32> {
    rows.iter().flat_map(|row| &values[*row as usize * cols..][..cols]).copied().collect()
}

/// What a [`troika_engine::StepRunner`] around another, its field `inner`, leaves to that one: sequences, and what they are.
macro_rules! forward_sequences {
    () => {
        fn state_shape(&self) -> &StateShape {
            self.inner.state_shape()
        }

        fn arithmetic(&self) -> String {
            self.inner.arithmetic()
        }

        fn tile(&self) -> Option<usize> {
            self.inner.tile()
        }

        fn step_bytes(&self, rows: usize, logit_rows: usize) -> u64 {
            self.inner.step_bytes(rows, logit_rows)
        }

        fn new_sequence(&mut self) -> SequenceId {
            self.inner.new_sequence()
        }

        fn adopt(&mut self, state: SequenceState) -> SequenceId {
            StepRunner::adopt(&mut self.inner, state)
        }

        fn sequence_state(&self, sequence: SequenceId) -> Result<Arc<SequenceState>, RunnerError> {
            self.inner.sequence_state(sequence)
        }

        fn drop_sequence(&mut self, sequence: SequenceId) {
            self.inner.drop_sequence(sequence);
        }
    };
}
pub(crate) use forward_sequences;
