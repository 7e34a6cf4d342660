//! Finding and opening a model: a folder given by the user, or the one that comes along.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, bail};
use clap::Args;
use sha2::{Digest, Sha256};
use troika_base::NumericClass;
use troika_device::cpu::{CpuLevel, CpuOptions};
use troika_device::map_file;
use troika_engine::{
    Calibration, Choice, CostTable, Engines, Record, Runner, RunnerOptions, Stage, calibrate_engines, choose_engines,
    plan_engines,
};
use troika_model::{Checkpoint, ConfigFile, ModelFacts, ScaleCheck, WeightTable};
use troika_prompt::{FixedTexts, Tokenizer};

use crate::hybrid::{HybridArgs, Wish, Wished};
use crate::plan_file::{Key, PlanFile};
use crate::{builtin, drafter, progress};

/// Which model, and how it is computed.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Folder of a checkpoint: config.json, safetensors files and tokenizer.json. Without it, the built-in model nano.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Arithmetic: `fast` (activations rounded to 8 bits before integer products), `fast-fp8-exact` (the same for fp4
    /// weights only), `exact` (f32 throughout) or `official` (cache rows rounded as published). Without it, `fast` to generate, serve and bench, `exact` to evaluate.
    #[arg(long, value_name = "CLASS")]
    class: Option<NumericClass>,
    /// Threads that compute; 0 = one per physical core.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) threads: u16,
    /// Keep each of these threads on a core of its own. For a machine that does nothing else. Linux only.
    #[arg(long)]
    pin_threads: bool,
    /// Instructions to compute with: `scalar`, `avx2`, `avx512` or `avx512-vnni`. Without it, the best of this CPU. For
    /// comparisons: each level is as exact as the others.
    #[arg(long, value_name = "LEVEL", value_parser = available_level)]
    cpu_level: Option<CpuLevel>,
}

fn available_level(text: &str) -> Result<CpuLevel, String> {
    let available: Vec<CpuLevel> = CpuLevel::available().collect();
    level_among(text, &available)
}

fn level_among(text: &str, available: &[CpuLevel]) -> Result<CpuLevel, String> {
    let level: CpuLevel = text.parse()?;
    if available.contains(&level) {
        return Ok(level);
    }
    let names: Vec<&str> = available.iter().map(|level| level.name()).collect();
    Err(format!("this CPU lacks the instructions of level {text}; it has those of {}", names.join(", ")))
}

/// Checkpoints up to this size are digested whole: a second at most.
const WHOLE_DIGEST_BYTES: u64 = 256 << 20;

/// A checkpoint whose weights are complete and sound.
pub(crate) struct OpenModel {
    /// What clients call it.
    pub(crate) name: String,
    pub(crate) config: ConfigFile,
    checkpoint: Checkpoint,
    weights: WeightTable,
    facts: ModelFacts,
    files: Files,
}

/// Where the small files of a checkpoint are.
enum Files {
    Dir(PathBuf),
    BuiltIn,
}

impl ModelArgs {
    /// The checkpoint in `model`, or nano, for whoever only wants to look at it.
    pub(crate) fn of(model: Option<PathBuf>, class: NumericClass) -> Self {
        Self { model, class: Some(class), threads: 0, pin_threads: false, cpu_level: None }
    }

    /// Opens the checkpoint and checks every weight. The tokenizer is not asked for yet.
    pub(crate) fn open(&self) -> Result<OpenModel> {
        match &self.model {
            Some(dir) => {
                let spinner = progress::spinner(format!("opening {}", dir.display()));
                let checkpoint = Checkpoint::open(dir, &map_file)?;
                let full = dir.canonicalize().ok();
                let name = full.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
                let model =
                    OpenModel::new(name.unwrap_or_else(|| "model".to_owned()), checkpoint, Files::Dir(dir.clone()));
                spinner.finish_and_clear();
                model
            }
            None => OpenModel::new(builtin::NAME.to_owned(), builtin::checkpoint()?, Files::BuiltIn),
        }
    }

    /// The arithmetic asked for, `default` if none was.
    pub(crate) fn class_or(&self, default: NumericClass) -> NumericClass {
        self.class.unwrap_or(default)
    }

    /// Options for a runner.
    pub(crate) fn runner_options(&self, class: NumericClass) -> RunnerOptions {
        let mut options = RunnerOptions::new(class);
        options.cpu.threads = usize::from(self.threads);
        options.cpu.pin = self.pin_threads;
        options.cpu.level = self.cpu_level();
        options
    }

    /// The instructions that will be used.
    pub(crate) fn cpu_level(&self) -> CpuLevel {
        self.cpu_level.unwrap_or_else(CpuLevel::best)
    }
}

impl OpenModel {
    fn new(name: String, checkpoint: Checkpoint, files: Files) -> Result<Self> {
        let check = ScaleCheck::for_size(checkpoint.files().num_file_bytes());
        if check == ScaleCheck::Skip {
            tracing::info!(
                "the checkpoint is too large to look at every scale; damaged ones would show as senseless text"
            );
        }
        let weights = WeightTable::build(&checkpoint, check)?;
        if let [first, rest @ ..] = weights.notes() {
            tracing::warn!("{first} ({} more such notes: see `troika inspect`)", rest.len());
        }
        Ok(Self { name, config: checkpoint.config().clone(), facts: weights.facts(), checkpoint, weights, files })
    }

    pub(crate) fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    /// Why there is no drafter, if there is none.
    pub(crate) fn drafter_unavailable(&self) -> Option<String> {
        let dir = if let Files::Dir(dir) = &self.files { Some(dir.as_path()) } else { None };
        drafter::unavailable(self.weights.drafter(), dir)
    }

    /// The model with a prompt, for simulated devices that compute it too.
    pub(crate) fn small<'a>(&'a self, tokens: &'a [u32]) -> troika_hwsim::Small<'a> {
        let (config, facts) = (self.config.model.clone(), self.facts.clone());
        troika_hwsim::Small { config, facts, weights: &self.weights, tokens }
    }

    /// Loads the weights onto the devices.
    pub(crate) fn runner(&self, options: RunnerOptions) -> Result<Runner> {
        let spinner = progress::spinner(format!("loading {}", self.name));
        let runner = Runner::new(self.config.model.clone(), self.facts.clone(), &self.weights, options)?;
        spinner.finish_and_clear();
        Ok(runner)
    }

    /// As [`Self::runner`], with the neural engines that the command line names, which may hold `memory_bytes`; and how many chunks
    /// of prompts are best in flight, unless `wavefront` says that.
    pub(crate) fn hybrid_runner(
        &self,
        mut options: RunnerOptions,
        hybrid: &HybridArgs,
        wavefront: Option<usize>,
        memory_bytes: u64,
    ) -> Result<(Runner, usize)> {
        let said = wavefront.unwrap_or(1);
        let mut wish = match hybrid.wish()? {
            Wished::Nothing => return Ok((self.runner(options)?, said)),
            Wished::Unavailable(reason) => {
                tracing::warn!(reason, "engines take no part");
                return Ok((self.runner_without(options, hybrid, reason)?, said));
            }
            Wished::Engines(wish) => wish,
        };
        wish.options.memory_bytes = memory_bytes;
        let alone = options;
        options.cpu = beside(options.cpu, &wish);
        let choice = self.expect_of_engines(hybrid, &mut wish, &alone, wavefront)?;
        if let Some(reason) = choice.as_ref().and_then(|choice| hybrid.decline(choice, threads_of(alone.cpu))) {
            tracing::info!(reason, "engines take no part");
            return Ok((self.runner_without(alone, hybrid, reason)?, said));
        }
        let spinner = progress::spinner(format!("loading {}", self.name));
        let mut show = |stage: Stage, done: usize, total: usize| {
            spinner.set_message(format!("{} projections: {done} of {total}", stage.name()));
        };
        let engines = Engines { backend: wish.backend, options: wish.options, progress: &mut show };
        let (config, facts) = (self.config.model.clone(), self.facts.clone());
        let runner = Runner::with_engines(config, facts, &self.weights, options, Some(engines))?;
        spinner.finish_and_clear();
        hybrid.check_available(&runner.feature())?;
        Ok((runner, choice.map_or(said, |choice| choice.wavefront)))
    }

    /// A runner whose engines take no part, for a reason.
    fn runner_without(&self, options: RunnerOptions, hybrid: &HybridArgs, reason: String) -> Result<Runner> {
        let mut runner = self.runner(options)?;
        runner.set_unavailable(reason);
        hybrid.check_available(&runner.feature())?;
        Ok(runner)
    }

    /// Completes a wish by what was measured now or at an earlier start. `alone` is the CPU without engines.
    pub(crate) fn expect_of_engines(
        &self,
        hybrid: &HybridArgs,
        wish: &mut Wish,
        alone: &RunnerOptions,
        wavefront: Option<usize>,
    ) -> Result<Option<Choice>> {
        let backend = Arc::clone(&wish.backend);
        let (tile, stack_inputs) = (wish.options.tile, wish.options.stack_inputs);
        let (cpu, cpu_alone) = (beside(alone.cpu, wish), alone.cpu);
        let measure = |dir: Option<&Path>, afresh: bool| {
            self.measure_engines(&Calibration { backend: &backend, tile, stack_inputs, cpu, cpu_alone }, dir, afresh)
        };
        hybrid.complete(wish, alone.class, measure, |table, said| {
            choose_engines(&self.config.model, &self.facts, table, said, wavefront)
        })
    }

    /// What projections cost on each device: from the file of an earlier start in `dir` or the user's folder, or, `afresh` or
    /// without it, measured now.
    pub(crate) fn measure_engines(
        &self,
        calibration: &Calibration<'_>,
        dir: Option<&Path>,
        afresh: bool,
    ) -> Result<CostTable> {
        let file = PlanFile::of(dir, Key::new(hex(&self.digests()?[0]), calibration));
        if let Some(table) = file.as_ref().filter(|_| !afresh).and_then(PlanFile::read) {
            return Ok(table);
        }
        let bar = progress::steps(0);
        bar.set_message("measuring projections");
        let mut show = |done: usize, total: usize| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        };
        let table = calibrate_engines(&self.config.model, &self.facts, &self.weights, calibration, &mut show)
            .context("cannot measure the engines; --hybrid off does without them")?;
        bar.finish_and_clear();
        let Some(file) = file else { return Ok(table) };
        file.write(&table);
        // As a restart will read it, to the last digit: it must choose the same.
        Ok(file.read().unwrap_or(table))
    }

    /// What engines would do of the model's projections.
    pub(crate) fn plan_engines(&self, wish: &Wish) -> Vec<Record> {
        let (config, facts) = (self.config.model.clone(), self.facts.clone());
        plan_engines(config, facts, &self.weights, &*wish.backend, &wish.options)
    }

    /// Bytes of the weights' files.
    pub(crate) fn weights_bytes(&self) -> u64 {
        self.checkpoint.files().num_file_bytes()
    }

    pub(crate) fn tokenizer(&self) -> Result<Arc<Tokenizer>> {
        Ok(Arc::new(match &self.files {
            Files::Dir(dir) => Tokenizer::from_file(&dir.join("tokenizer.json"))?,
            Files::BuiltIn => Tokenizer::from_bytes("tokenizer.json of nano", builtin::TOKENIZER)?,
        }))
    }

    /// Digests of weights and tokenizer, for the names of kept prefixes. A checkpoint of more than [`WHOLE_DIGEST_BYTES`] is
    /// not read whole, which would take minutes: its files' sizes, times of change and places stand for it.
    pub(crate) fn digests(&self) -> Result<[Vec<u8>; 2]> {
        let (config, tokenizer) = match &self.files {
            Files::Dir(dir) => {
                let read = |name: &str| {
                    let path = dir.join(name);
                    std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
                };
                (read("config.json")?, read("tokenizer.json")?)
            }
            Files::BuiltIn => (builtin::CONFIG.into(), builtin::TOKENIZER.to_vec()),
        };
        let weights = match &self.files {
            Files::Dir(dir) if self.checkpoint.files().num_file_bytes() > WHOLE_DIGEST_BYTES => {
                sampled_digest(&self.checkpoint, &config, dir)?
            }
            _ => whole_digest(&self.checkpoint, &config),
        };
        Ok([weights, Sha256::digest(tokenizer).to_vec()])
    }

    /// Fixed texts of its prompts.
    pub(crate) fn texts(&self) -> FixedTexts {
        let texts = match &self.files {
            Files::Dir(dir) => FixedTexts::from_checkpoint(dir),
            Files::BuiltIn => FixedTexts::from_source("encoding_dsv4.py of nano".into(), builtin::PROMPT_TEXTS),
        };
        for missing in texts.missing() {
            tracing::info!("{missing}");
        }
        for name in texts.unpublished() {
            tracing::debug!("the {name} is not the one that DeepSeek-V4 was published with");
        }
        texts
    }

    /// The checkpoint's advice on sampling: temperature and top_p of `generation_config.json`, 1 and 1 without it.
    pub(crate) fn sampling_advice(&self) -> Result<(f32, f32)> {
        const NAME: &str = "generation_config.json";
        let Files::Dir(dir) = &self.files else {
            return sampling_advice(Path::new(NAME), builtin::GENERATION_CONFIG);
        };
        let path = dir.join(NAME);
        match std::fs::read_to_string(&path) {
            Ok(text) => sampling_advice(&path, &text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok((1.0, 1.0)),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }
}

/// The CPU beside engines: unless threads were said, what is left of the cores.
pub(crate) fn beside(mut cpu: CpuOptions, wish: &Wish) -> CpuOptions {
    if cpu.threads == 0 {
        cpu.threads = threads_of(cpu).saturating_sub(wish.cores).max(1);
    }
    cpu
}

fn threads_of(cpu: CpuOptions) -> usize {
    match cpu.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    }
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Of the configuration and every byte of every tensor.
fn whole_digest(checkpoint: &Checkpoint, config: &[u8]) -> Vec<u8> {
    let mut hasher = Sha256::new_with_prefix(config);
    for (name, tensor) in checkpoint.files().iter() {
        let bytes: &[u8] = &tensor.bytes;
        hasher.update(format!("{name} {:?} {:?} {}\n", tensor.dtype, tensor.shape, bytes.len()));
        hasher.update(bytes);
    }
    hasher.finalize().to_vec()
}

/// Of the configuration, every tensor's name, type, shape and some of its bytes, and, since a change may be elsewhere, of
/// each file's size, time of change and place on the disk. A copy has other names for its prefixes than the original, which
/// costs computing them once more.
fn sampled_digest(checkpoint: &Checkpoint, config: &[u8], dir: &Path) -> Result<Vec<u8>> {
    let mut hasher = Sha256::new_with_prefix(config);
    for (name, tensor) in checkpoint.files().iter() {
        let bytes: &[u8] = &tensor.bytes;
        hasher.update(format!("{name} {:?} {:?} {}\n", tensor.dtype, tensor.shape, bytes.len()));
        for at in [0, bytes.len() / 2, bytes.len().saturating_sub(512)] {
            hasher.update(&bytes[at..bytes.len().min(at + 512)]);
        }
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry.with_context(|| format!("cannot read {}", dir.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            // Of the file itself where the name is a link, as in the caches of download tools.
            let metadata = std::fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            files.push(format!("{name} {} {changed:?} {:?}\n", metadata.len(), place_of(&metadata)));
        }
    }
    files.sort_unstable();
    files.iter().for_each(|file| hasher.update(file));
    Ok(hasher.finalize().to_vec())
}

/// Device and number of a file, and when anything about it was changed last, which nobody can set back.
#[cfg(unix)]
fn place_of(metadata: &Metadata) -> [i64; 4] {
    use std::os::unix::fs::MetadataExt as _;
    [metadata.dev() as i64, metadata.ino() as i64, metadata.ctime(), metadata.ctime_nsec()]
}

#[cfg(not(unix))]
fn place_of(_: &Metadata) -> [i64; 0] {
    []
}

fn sampling_advice(path: &Path, text: &str) -> Result<(f32, f32)> {
    let json: serde_json::Value =
        serde_json::from_str(text).with_context(|| format!("{} is not valid JSON", path.display()))?;
    let number = |key: &str, most: f64| match json.get(key) {
        None | Some(serde_json::Value::Null) => Ok(1.0),
        Some(value) => match value.as_f64() {
            Some(number) if (0.0..=most).contains(&number) => Ok(number as f32),
            _ => bail!("{}: {key} must be a number from 0 to {most}, not {value}", path.display()),
        },
    };
    let greedy = json.get("do_sample") == Some(&serde_json::Value::Bool(false));
    Ok((if greedy { 0.0 } else { number("temperature", 100.0)? }, number("top_p", 1.0)?))
}

#[cfg(test)]
mod tests {
    use troika_testkit::CheckpointCopy;

    use super::*;

    #[test]
    fn a_level_that_the_cpu_lacks_is_refused() {
        let old = [CpuLevel::Scalar, CpuLevel::Avx2];
        assert_eq!(level_among("avx2", &old), Ok(CpuLevel::Avx2));
        let lacks = "this CPU lacks the instructions of level avx512; it has those of scalar, avx2";
        assert_eq!(level_among("avx512", &old), Err(lacks.to_owned()));
        assert!(level_among("AVX2", &old).is_err_and(|error| error.contains("`AVX2`: expected `scalar`")));
    }

    /// A byte that no sample covers, changed in place: another digest. Nothing changed: the same.
    #[test]
    fn every_change_of_the_weights_changes_their_digest() {
        let copy = CheckpointCopy::of("tiny");
        let path = copy.file("model.safetensors");
        let digests = || {
            let checkpoint = Checkpoint::open(copy.path(), &map_file).expect("opens");
            let whole = whole_digest(&checkpoint, b"config");
            (whole, sampled_digest(&checkpoint, b"config", copy.path()).expect("readable"))
        };
        let before = digests();
        assert_eq!(digests(), before);
        let mut bytes = std::fs::read(&path).expect("readable");
        let size = bytes.len();
        // Not at the start, in the middle or at the end of any tensor of a few kilobytes.
        bytes[size - 3000] ^= 1;
        std::fs::write(&path, &bytes).expect("writable");
        let after = digests();
        assert_ne!(after.0, before.0);
        assert_ne!(after.1, before.1);
        // The same bytes under the same name are another file all the same.
        bytes[size - 3000] ^= 1;
        std::fs::remove_file(&path).expect("removable");
        std::fs::write(&path, &bytes).expect("writable");
        let again = digests();
        assert_eq!(again.0, before.0);
        assert!(again.1 != before.1 && again.1 != after.1);
    }
}
