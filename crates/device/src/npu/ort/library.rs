//! Finding and opening ONNX Runtime, and the vendors' plug-ins for it.
//!
//! The library allows one environment per process, so it is opened once and stays. This is the only state of a process here.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ort::environment::Environment;
use ort::logging::LogLevel;

/// The library's file; wheels and packages append versions. By itself it is what the system's search is asked for.
pub const NAME: &str = if cfg!(target_os = "windows") {
    "onnxruntime.dll"
} else if cfg!(target_vendor = "apple") {
    "libonnxruntime.dylib"
} else {
    "libonnxruntime.so"
};

static OPEN: Mutex<Option<Library>> = Mutex::new(None);
/// The first error that the library has logged since somebody asked: what it returns is often only what came of it.
static LOGGED: Mutex<Option<String>> = Mutex::new(None);

/// The open library.
#[derive(Clone)]
pub(super) struct Library {
    pub(super) environment: Environment,
    /// Where it was opened.
    pub(super) path: PathBuf,
    /// The commit that it was built from.
    pub(super) build: String,
    /// Names of the providers in each plug-in.
    plugins: BTreeMap<PathBuf, Vec<String>>,
}

/// Opens the first of `places` that is the library: a file, a folder that holds it (a wheel's, an environment's), or a name
/// for the system's search. Fails with what was wrong with each.
pub(super) fn open(places: &[PathBuf]) -> Result<Library, String> {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut reasons = Vec::new();
    for place in places {
        let path = match resolve(place) {
            Ok(path) => path,
            Err(reason) => {
                reasons.push(reason);
                continue;
            }
        };
        if let Some(library) = &*open {
            // Two that are named differently would be two libraries in one process.
            if library.path == path || places.len() > 1 {
                return Ok(library.clone());
            }
            let first = library.path.display();
            return Err(format!("{} cannot be opened beside {first}, which this process has open", path.display()));
        }
        match ort::init_from(&path) {
            Ok(builder) => {
                let logger = Arc::new(|level: LogLevel, _: &str, _: &str, _: &str, message: &str| match level {
                    LogLevel::Verbose | LogLevel::Info => tracing::trace!("onnxruntime: {message}"),
                    LogLevel::Warning => tracing::debug!("onnxruntime: {message}"),
                    LogLevel::Error | LogLevel::Fatal => {
                        tracing::debug!("onnxruntime: {message}");
                        LOGGED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| message.to_owned());
                    }
                });
                let builder = builder.with_name("troika").with_telemetry(false).with_logger(logger);
                let environment = builder.build().map_err(|error| format!("{}: {error}", path.display()))?;
                environment.set_log_level(LogLevel::Warning);
                let library = Library { environment, path, build: build(ort::info()), plugins: BTreeMap::new() };
                *open = Some(library.clone());
                return Ok(library);
            }
            Err(ort::LoadDynamicError::Dlopen { error, path }) => {
                // Only what lies behind it says what the system did not like, and mostly of which file.
                let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                let path = path.to_string_lossy();
                reasons.push(if why.contains(&*path) { why } else { format!("{path}: {why}") });
            }
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(reasons.join("; "))
}

/// The first error that was logged since the last call.
pub(super) fn take_logged() -> Option<String> {
    LOGGED.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl Library {
    /// Names of the providers that the plug-in in the file `path` brings along. It is registered once.
    pub(super) fn register(&self, name: &str, path: &Path) -> Result<Vec<String>, String> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let library = open.as_mut().expect("it is open, since `self` is");
        if let Some(providers) = library.plugins.get(path) {
            return Ok(providers.clone());
        }
        let providers = |environment: &Environment| -> Vec<String> {
            environment.devices().filter_map(|device| device.ep().ok().map(str::to_owned)).collect()
        };
        let before = providers(&library.environment);
        let error = |error: ort::Error| format!("{} is no plug-in that can be used: {error}", path.display());
        library.environment.register_ep_library(name, path).map_err(error)?;
        let mut new = providers(&library.environment);
        new.retain(|provider| !before.contains(provider));
        new.dedup();
        library.plugins.insert(path.to_owned(), new.clone());
        Ok(new)
    }
}

/// `abc` of `git-branch=HEAD, git-commit-id=abc, build type=Release`.
fn build(info: &str) -> String {
    info.split(',').find_map(|part| part.trim().strip_prefix("git-commit-id=")).unwrap_or("unknown").to_owned()
}

/// The file that `place` stands for.
fn resolve(place: &Path) -> Result<PathBuf, String> {
    if place.is_dir() {
        let found = folders(place).into_iter().find_map(|folder| library_in(&folder));
        return found.ok_or_else(|| format!("there is no {NAME} in {}", place.display()));
    }
    if place.components().count() > 1 && !place.exists() {
        return Err(format!("{} does not exist", place.display()));
    }
    // A link is followed, so that what lies beside the file is found too.
    Ok(place.canonicalize().unwrap_or_else(|_| place.to_owned()))
}

/// Where a folder may hold the library: a Python environment, its packages, the package, or the folder itself.
fn folders(place: &Path) -> Vec<PathBuf> {
    let below = ["", "capi", "onnxruntime/capi", "lib", "Lib/site-packages/onnxruntime/capi"];
    let mut folders: Vec<PathBuf> = below.iter().map(|below| place.join(below)).collect();
    let pythons = fs::read_dir(place.join("lib")).into_iter().flatten().flatten();
    folders.extend(pythons.map(|python| python.path().join("site-packages/onnxruntime/capi")));
    folders
}

/// The library in a folder; the last by name if there are several versions.
fn library_in(folder: &Path) -> Option<PathBuf> {
    let (stem, suffix) = NAME.rsplit_once('.')?;
    let files = fs::read_dir(folder).ok()?.flatten().map(|file| file.path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        // `libonnxruntime.so.1.32.0`, `libonnxruntime.1.32.0.dylib`, but not `libonnxruntime_providers_shared.so`.
        name.strip_prefix(stem).is_some_and(|rest| rest.starts_with('.') && rest.contains(suffix))
    };
    files.filter(is_library).max()?.canonicalize().ok()
}

/// Files that are looked for beside the library: plug-ins lie in packages of their own beside the library's.
pub(super) fn beside(library: &Path, package: &str, file: &str) -> Option<PathBuf> {
    let name = match NAME.rsplit_once('.') {
        Some((stem, suffix)) if stem.starts_with("lib") => format!("lib{file}.{suffix}"),
        _ => format!("{file}.dll"),
    };
    let folder = library.parent()?;
    // `site-packages/onnxruntime/capi/libonnxruntime.so` and `site-packages/PACKAGE`.
    let packages = folder.parent().and_then(Path::parent).map(|packages| packages.join(package));
    let paths = [Some(folder.join(&name)), packages.map(|folder| folder.join(&name))];
    paths.into_iter().flatten().find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_are_what_the_library_says() {
        let info = "ORT Build Info: git-branch=HEAD, git-commit-id=26250ae, build type=Release, cmake cxx flags: x";
        assert_eq!((&*build(info), &*build("?")), ("26250ae", "unknown"));
    }
}
