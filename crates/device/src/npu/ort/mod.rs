//! Neural engines of other makers through ONNX Runtime, a library that is opened when the program runs.
//!
//! Procedures become ONNX graphs ([`graph`], [`proto`]) for the compiler of one *provider*; nothing of a graph may be left to
//! the runtime's own CPU code, unless that is the provider. `bank.rs` runs them, [`library`] opens the library.
//!
//! Results are not repeated bit by bit by the primary device, so `limits().repeatable` is false.

mod bank;
mod graph;
mod library;
mod proto;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::UNIX_EPOCH;

use ort::compiler::ModelCompiler;
use ort::ep::{self, ArbitrarilyConfigurableExecutionProvider as _, ExecutionProvider as _};
use ort::memory::DeviceType;
use ort::session::Session;
use ort::session::builder::SessionBuilder;

use self::bank::OrtBank;
pub use self::graph::Form;
use self::graph::{Stage, stages};
use self::library::Library;
pub use self::library::NAME as LIBRARY_NAME;
use super::{Bank, Compiled, Limits, NpuBackend, NpuError, Procedure, Program};
use crate::cpu::cores;

/// Who compiles and runs the graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// ONNX Runtime's own code: on cores of its own, for tests and comparisons.
    Cpu,
    /// Qualcomm's neural engines, or their emulator.
    Qnn,
    /// Intel's.
    OpenVino,
    /// Apple's.
    CoreMl,
    /// AMD's.
    Vitis,
}

impl Provider {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Qnn, Self::OpenVino, Self::CoreMl, Self::Vitis];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Qnn => "qnn",
            Self::OpenVino => "openvino",
            Self::CoreMl => "coreml",
            Self::Vitis => "vitis",
        }
    }

    /// True if compiled programs can be kept as bytes.
    fn compiles_ahead(self) -> bool {
        matches!(self, Self::Qnn | Self::OpenVino | Self::Vitis)
    }

    /// Package and file of its plug-in.
    fn plugin(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Qnn => Some(("onnxruntime_qnn", "onnxruntime_providers_qnn")),
            Self::OpenVino => Some(("onnxruntime_ep_openvino", "onnxruntime_providers_openvino_plugin")),
            Self::Cpu | Self::CoreMl | Self::Vitis => None,
        }
    }

    /// True if the library itself has it.
    fn is_built_in(self) -> bool {
        match self {
            Self::Cpu => Ok(true),
            Self::Qnn => ep::QNN::is_available(),
            Self::OpenVino => ep::OpenVINO::is_available(),
            Self::CoreMl => ep::CoreML::is_available(),
            Self::Vitis => ep::Vitis::is_available(),
        }
        // Who cannot say what it has does not have it.
        .unwrap_or(false)
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Provider {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|provider| provider.name() == text);
        let names = || Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("unknown provider `{text}`: expected one of {}", names()))
    }
}

/// Settings of an [`Ort`] engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrtOptions {
    /// Where the library may be: files, folders that hold it, names for the system's search. The first that works is used.
    pub places: Vec<PathBuf>,
    /// Who computes.
    pub provider: Provider,
    /// The provider's plug-in, if it is neither part of the library nor beside it.
    pub plugin: Option<PathBuf>,
    /// How numbers cross the edges of graphs; `None` = as suits the provider.
    pub form: Option<Form>,
    /// Instances, each with sessions of its own.
    pub instances: usize,
    /// Threads of each session; only the CPU provider computes with them.
    pub threads: usize,
    /// Settings of the provider, by the names that it gives them. They go before ours.
    pub settings: BTreeMap<String, String>,
}

/// One instance on the CPU's provider, of a library without a place.
impl Default for OrtOptions {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            provider: Provider::Cpu,
            plugin: None,
            form: None,
            instances: 1,
            threads: 1,
            settings: BTreeMap::new(),
        }
    }
}

/// Where a provider comes from.
enum Source {
    /// The library.
    BuiltIn,
    /// A plug-in, with these names for its devices.
    Plugin { path: PathBuf, providers: Vec<String> },
}

/// See the module.
pub struct Ort {
    library: Library,
    source: Source,
    provider: Provider,
    form: Form,
    threads: usize,
    settings: BTreeMap<String, String>,
    limits: Limits,
    /// What the plug-in computes on, for people.
    device: String,
}

impl Ort {
    /// Opens the library and looks for the provider.
    ///
    /// # Errors
    ///
    /// [`NpuError::Unavailable`] with the way out, if either is not there or cannot be used.
    ///
    /// # Panics
    ///
    /// Without instances or threads.
    pub fn start(options: &OrtOptions) -> Result<Self, NpuError> {
        assert!(options.instances > 0 && options.threads > 0, "an engine needs instances and threads");
        let unavailable = |reason: String| NpuError::Unavailable { name: "ort".to_owned(), reason };
        let library = library::open(&options.places).map_err(|reasons| {
            unavailable(format!(
                "ONNX Runtime cannot be opened ({reasons}); install it, for example with `pip install onnxruntime`, and \
                 name its library or the folder of the Python environment: --npu ort:lib=PATH, or ORT_DYLIB_PATH"
            ))
        })?;
        let provider = options.provider;
        let source = find(&library, provider, options.plugin.as_deref()).map_err(unavailable)?;
        let form = options.form.unwrap_or(if provider == Provider::CoreMl { Form::Float } else { Form::Quantized });
        let limits = Limits {
            min_tile: 16,
            tile_multiple: 16,
            channel_alignment: 8,
            input_alignment: 32,
            bank_bytes: u64::MAX,
            instances: options.instances,
            repeatable: false,
        };
        let mut engine = Self {
            library,
            source,
            provider,
            form,
            threads: options.threads,
            settings: BTreeMap::new(),
            limits,
            device: String::new(),
        };
        engine.device = engine.device_name().map_err(unavailable)?;
        engine.settings = engine.default_settings();
        engine.settings.extend(options.settings.clone());
        if provider != Provider::Cpu {
            // What is wrong with every graph is found out now: settings, drivers, a device that is not there.
            let trial = Stage::trial(engine.limits.min_tile).to_onnx(engine.form);
            let trial = trial.and_then(|graph| engine.compile_graph(&graph).map_err(what_happened));
            trial.map_err(|reason| unavailable(format!("provider {provider} compiles nothing here: {reason}")))?;
        }
        Ok(engine)
    }

    /// True if what is compiled can be kept on disk.
    pub fn compiles_ahead(&self) -> bool {
        self.provider.compiles_ahead()
    }

    /// Cores that it takes from the primary device.
    pub fn num_cores(&self) -> usize {
        if self.provider == Provider::Cpu { self.threads * self.limits.instances } else { 0 }
    }

    /// What is set unless the user says otherwise.
    fn default_settings(&self) -> BTreeMap<String, String> {
        let set = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        match (self.provider, &self.source) {
            (Provider::Qnn, Source::Plugin { path, .. }) => {
                // Beside the plug-in, so that no other version of it is found.
                let file = if cfg!(target_os = "windows") { "QnnHtp.dll" } else { "libQnnHtp.so" };
                let path = path.with_file_name(file);
                set(&[("backend_path", &path.to_string_lossy())])
            }
            (Provider::Qnn, Source::BuiltIn) => set(&[("backend_type", "htp")]),
            (Provider::OpenVino, Source::BuiltIn) => set(&[("device_type", "NPU")]),
            (Provider::CoreMl, _) => set(&[
                ("ModelFormat", "MLProgram"),
                ("MLComputeUnits", "CPUAndNeuralEngine"),
                ("RequireStaticInputShapes", "1"),
            ]),
            _ => BTreeMap::new(),
        }
    }

    /// Vendor and kind of the devices of a plug-in that sessions are for: neural engines if it has any.
    fn device_name(&self) -> Result<String, String> {
        let Source::Plugin { path, .. } = &self.source else { return Ok("built in".to_owned()) };
        let kinds: Vec<DeviceType> = self.devices().map(|device| device.hardware_device().ty()).collect();
        match kinds.first() {
            Some(DeviceType::NPU) => Ok(format!("{} neural engine", path.display())),
            // Qualcomm's emulator computes on the CPU what the engine would.
            Some(_) if self.provider == Provider::Qnn => Ok(format!("{}, emulated on the CPU", path.display())),
            _ => Err(format!(
                "the plug-in {} finds no neural engine here: a driver may be missing, or the machine has none",
                path.display()
            )),
        }
    }

    /// The plug-in's neural engines, or all its devices if there are none.
    fn devices(&self) -> impl Iterator<Item = ort::device::Device<'_>> {
        let providers: &[String] = match &self.source {
            Source::BuiltIn => &[],
            Source::Plugin { providers, .. } => providers,
        };
        let own = |device: &ort::device::Device<'_>| device.ep().is_ok_and(|ep| providers.iter().any(|own| own == ep));
        let is_npu = |device: &ort::device::Device<'_>| device.hardware_device().ty() == DeviceType::NPU;
        let any_npu = self.library.environment.devices().any(|device| own(&device) && is_npu(&device));
        // One device: a session over several would be cut up between them.
        self.library.environment.devices().filter(move |device| own(device) && (!any_npu || is_npu(device))).take(1)
    }

    fn builder(&self) -> ort::Result<SessionBuilder> {
        let builder = Session::builder(&self.library.environment)?;
        let builder = builder.with_intra_threads(self.threads)?.with_inter_threads(1)?.with_intra_op_spinning(false)?;
        if self.provider == Provider::Cpu {
            // Fused, quantized products would round activations to 8 bits for an instruction that saturates without VNNI,
            // or for one that takes a product with 8-bit weights and 16-bit activations for one of 8 bits.
            let builder = builder.with_quant_qdq(false)?.with_precise_qmm()?;
            return Ok(builder.with_execution_providers([ep::CPU::default().build().error_on_failure()])?);
        }
        let builder = builder.with_disable_cpu_fallback()?;
        if let Source::Plugin { providers, .. } = &self.source {
            let settings: Vec<(String, String)> = providers
                .iter()
                .flat_map(|provider| self.settings.iter().map(move |(k, v)| (format!("{provider}.{k}"), v.clone())))
                .collect();
            return Ok(builder.with_devices(self.devices(), Some(&settings))?);
        }
        macro_rules! built_in {
            ($provider:expr) => {
                self.settings.iter().fold($provider, |all, (k, v)| all.with_arbitrary_config(k, v)).build()
            };
        }
        let provider = match self.provider {
            Provider::Cpu | Provider::Qnn => built_in!(ep::QNN::default()),
            Provider::OpenVino => built_in!(ep::OpenVINO::default()),
            Provider::CoreMl => built_in!(ep::CoreML::default()),
            Provider::Vitis => built_in!(ep::Vitis::default()),
        };
        Ok(builder.with_execution_providers([provider.error_on_failure()])?)
    }

    /// A stage's graph as the provider's compiler leaves it; nothing if it compiles when a session is made, which is tried then.
    fn compile_graph(&self, graph: &[u8]) -> ort::Result<Option<Vec<u8>>> {
        library::take_logged();
        if !self.compiles_ahead() {
            return self.builder()?.commit_from_memory(graph).map(|_| None);
        }
        let compiler = ModelCompiler::new(self.builder()?)?.with_model_from_memory(graph)?.with_embed_ep_context()?;
        Ok(Some(compiler.compile_to_buffer()?.to_vec()))
    }
}

/// The provider in the library, in the plug-in that was named, or in one beside the library.
fn find(library: &Library, provider: Provider, plugin: Option<&Path>) -> Result<Source, String> {
    if provider.is_built_in() && plugin.is_none() {
        return Ok(Source::BuiltIn);
    }
    let path = match (plugin, provider.plugin()) {
        (Some(path), _) => path.canonicalize().map_err(|error| format!("plugin={}: {error}", path.display()))?,
        (None, Some((package, file))) => library::beside(&library.path, package, file).ok_or_else(|| {
            let package = package.replace('_', "-");
            format!(
                "{} has no provider {provider}, and no plug-in lies beside it; install the package {package} in the same \
                 Python environment, or name the plug-in's file: --npu ort:provider={provider},plugin=PATH",
                library.path.display()
            )
        })?,
        (None, None) => {
            let path = library.path.display();
            return Err(format!("{path} was built without provider {provider}; name a library that has it: lib=PATH"));
        }
    };
    let providers = library.register(provider.name(), &path)?;
    if providers.is_empty() {
        return Err(format!("the plug-in {} offers no device on this machine", path.display()));
    }
    Ok(Source::Plugin { path, providers })
}

impl NpuBackend for Ort {
    fn name(&self) -> &str {
        "ort"
    }

    fn description(&self) -> String {
        let (path, build) = (self.library.path.display(), &self.library.build);
        let on = match self.provider {
            Provider::Cpu => format!("{} x {} cores", self.limits.instances, self.threads),
            _ => self.device.clone(),
        };
        format!("ONNX Runtime at {path}, build {build}, provider {} ({on})", self.provider)
    }

    /// Library, provider, its settings and files: whatever may change what comes out.
    fn version(&self) -> String {
        let plugin = match &self.source {
            Source::BuiltIn => String::new(),
            Source::Plugin { path, .. } => stamp(path),
        };
        // Settings that name files, such as a vendor's own library, stand for what is in them.
        let stamps = self.settings.values().map(|value| stamp(Path::new(value))).filter(|stamp| !stamp.is_empty());
        let stamps: Vec<String> = stamps.collect();
        format!(
            "ort-1-{}-{}-{:?}-{}-{:?}-{plugin}-{stamps:?}",
            self.library.build, self.provider, self.form, self.threads, self.settings
        )
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError> {
        let refused = |reason: String| NpuError::Compile { procedure: procedure.name.clone(), reason };
        let stages = stages(procedure).map_err(refused)?;
        let mut blobs = Vec::new();
        // The CPU provider takes every graph that we make, and sessions are all it makes of them.
        if self.provider != Provider::Cpu {
            for stage in &stages {
                let graph = stage.to_onnx(self.form).map_err(refused)?;
                blobs.extend(self.compile_graph(&graph).map_err(|error| refused(what_happened(error)))?);
            }
        }
        // Without a program of its own the runtime unfolds weights to 32 bits.
        let unfolded = stages.iter().map(|stage| 4 * (stage.groups.len() * stage.cols * stage.outputs) as u64).sum();
        let compiled = blobs.iter().map(|blob| blob.len() as u64).sum();
        let resident_bytes = if blobs.is_empty() { unfolded } else { compiled };
        Ok(Compiled { blob: join(&blobs), resident_bytes })
    }

    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError> {
        let bytes = programs.iter().map(|(_, compiled)| compiled.resident_bytes).sum();
        let mut bank = OrtBank::new(self.form);
        for (procedure, compiled) in programs {
            let mut load = || -> Result<(), String> {
                let stages = stages(procedure)?;
                let mut blobs = cut(&compiled.blob)?.into_iter();
                let mut loaded = Vec::new();
                for stage in stages {
                    let graph;
                    let program = match blobs.next() {
                        Some(blob) => blob,
                        None => {
                            graph = stage.to_onnx(self.form)?;
                            &graph
                        }
                    };
                    library::take_logged();
                    let session = self.builder().and_then(|mut builder| builder.commit_from_memory(program));
                    loaded.push((stage, session.map_err(what_happened)?));
                }
                bank.push(procedure, loaded).map_err(|error| error.to_string())
            };
            load().map_err(|reason| {
                let reason = format!("{}: {reason}", procedure.name);
                NpuError::Load { instance, bytes, reason }
            })?;
        }
        Ok(Box::new(bank))
    }

    fn enter(&self, instance: usize) {
        if self.provider == Provider::Cpu && self.threads == 1 {
            cores::pin_from_the_end("ort", instance);
        }
    }
}

/// An error and what led to it, as far as the library has logged it.
#[expect(clippy::needless_pass_by_value, reason = "it goes behind `map_err`")]
fn what_happened(error: ort::Error) -> String {
    match library::take_logged() {
        Some(first) if !error.message().contains(&first) => format!("{error} (it began with: {first})"),
        _ => error.to_string(),
    }
}

/// Several programs as one: each behind its length.
fn join(blobs: &[Vec<u8>]) -> Vec<u8> {
    let mut joined = Vec::new();
    for blob in blobs {
        joined.extend((blob.len() as u64).to_le_bytes());
        joined.extend(blob);
    }
    joined
}

/// The programs in [`join`]'s bytes.
fn cut(mut joined: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut blobs = Vec::new();
    while !joined.is_empty() {
        let (len, rest) = joined.split_first_chunk().ok_or("its program is cut off")?;
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let (blob, rest) = rest.split_at_checked(len).ok_or("its program is cut off")?;
        blobs.push(blob);
        joined = rest;
    }
    Ok(blobs)
}

/// Size and time of change of a file, empty if there is none.
fn stamp(path: &Path) -> String {
    let Ok(metadata) = path.metadata() else { return String::new() };
    let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} bytes of {}", metadata.len(), changed.map_or(0, |time| time.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_joined_and_cut() {
        let blobs = vec![vec![1, 2, 3], vec![], vec![4]];
        assert_eq!(cut(&join(&blobs)), Ok(vec![&[1u8, 2, 3][..], &[], &[4]]));
        assert_eq!(join(&[]), Vec::<u8>::new());
        let joined = join(&blobs);
        assert!(
            (1..joined.len()).filter(|len| cut(&joined[..*len]).is_err()).count() > 20,
            "all but at whole programs"
        );
    }

    #[test]
    fn a_missing_library_is_unavailable_with_the_way_out() {
        let options = OrtOptions {
            places: vec![PathBuf::from("/nowhere/libonnxruntime.so"), std::env::temp_dir().join("no such folder")],
            ..OrtOptions::default()
        };
        let Err(NpuError::Unavailable { reason, .. }) = Ort::start(&options) else { panic!("there is no such file") };
        assert!(reason.contains("/nowhere/libonnxruntime.so") && reason.contains("--npu ort:lib=PATH"), "{reason}");
    }
}
