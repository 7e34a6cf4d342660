//! Finding and opening a model: a folder given by the user, or the one that comes along.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use sha2::{Digest, Sha256};
use troika_base::NumericClass;
use troika_device::map_file;
use troika_engine::{Engines, Record, Runner, RunnerOptions, Stage, plan_engines};
use troika_model::{Checkpoint, ConfigFile, ModelFacts, ScaleCheck, WeightTable};
use troika_prompt::{FixedTexts, Tokenizer};

use crate::hybrid::{HybridArgs, Wish};
use crate::{builtin, progress};

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
    /// Worker threads; 0 = one per core.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) threads: u16,
}

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
        options
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

    /// Loads the weights onto the devices.
    pub(crate) fn runner(&self, options: RunnerOptions) -> Result<Runner> {
        let spinner = progress::spinner(format!("loading {}", self.name));
        let runner = Runner::new(self.config.model.clone(), self.facts.clone(), &self.weights, options)?;
        spinner.finish_and_clear();
        Ok(runner)
    }

    /// As [`Self::runner`], with the neural engines that the command line names.
    pub(crate) fn hybrid_runner(&self, mut options: RunnerOptions, hybrid: &HybridArgs) -> Result<Runner> {
        let Some(wish) = hybrid.wish()? else { return self.runner(options) };
        if options.cpu.threads == 0 {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            options.cpu.threads = cores.saturating_sub(wish.cores).max(1);
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
        Ok(runner)
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

    /// Digests of weights and tokenizer, for the names of kept prefixes. Of a large checkpoint, every tensor's name, type,
    /// shape and some of its bytes are covered, not all of them: reading a hundred gigabytes would take minutes.
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
        let files = self.checkpoint.files();
        let is_small = files.num_file_bytes() <= 256 << 20;
        let mut hasher = Sha256::new();
        hasher.update(config);
        for (name, tensor) in files.iter() {
            let bytes: &[u8] = &tensor.bytes;
            hasher.update(format!("{name} {:?} {:?} {}\n", tensor.dtype, tensor.shape, bytes.len()));
            if is_small {
                hasher.update(bytes);
            } else {
                for at in [0, bytes.len() / 2, bytes.len().saturating_sub(512)] {
                    hasher.update(&bytes[at..bytes.len().min(at + 512)]);
                }
            }
        }
        Ok([hasher.finalize().to_vec(), Sha256::digest(tokenizer).to_vec()])
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
