//! Compiled procedures on disk: found again after a restart, never taken for others, never believed when damaged.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tempfile::tempdir;
use troika_base::{Format, SharedBytes, StoredTensor};
use troika_device::npu::cache::{Cached, CompileCounts};
use troika_device::npu::soft::{Soft, SoftOptions};
use troika_device::npu::{
    Bank, Body, ChannelWeights, Compiled, Limits, NpuBackend, NpuError, Procedure, ProcedureId, Product, Program,
};
use troika_kernels::Ctx;

/// Its programs have 1,000 bytes, the first of them the number of a compilation.
struct Compiler {
    soft: Soft,
    version: &'static str,
    compilations: AtomicU64,
    /// Programs of earlier compilations are not loaded.
    accepted_from: AtomicU64,
}

impl Compiler {
    fn new(version: &'static str) -> Arc<Self> {
        let soft = Soft::start(SoftOptions::default()).expect("it starts");
        Arc::new(Self { soft, version, compilations: AtomicU64::new(0), accepted_from: AtomicU64::new(0) })
    }
}

impl NpuBackend for Compiler {
    fn name(&self) -> &str {
        "compiler"
    }

    fn description(&self) -> String {
        self.soft.description()
    }

    fn version(&self) -> String {
        self.version.to_owned()
    }

    fn limits(&self) -> &Limits {
        self.soft.limits()
    }

    fn compile(&self, procedure: &Procedure) -> Result<Compiled, NpuError> {
        let number = self.compilations.fetch_add(1, Ordering::SeqCst);
        let blob = [&number.to_le_bytes()[..], &[7; 992]].concat();
        Ok(Compiled { blob, resident_bytes: procedure.weight_bytes() })
    }

    fn load(&self, instance: usize, programs: &[Program]) -> Result<Box<dyn Bank>, NpuError> {
        let accepted_from = self.accepted_from.load(Ordering::SeqCst);
        let number = |compiled: &Compiled| u64::from_le_bytes(*compiled.blob.first_chunk().expect("1,000 bytes"));
        if programs.iter().any(|(_, compiled)| number(compiled) < accepted_from) {
            return Err(NpuError::Load { instance, bytes: 0, reason: "of another driver".to_owned() });
        }
        self.soft.load(instance, programs)
    }
}

const ROOMY: u64 = 1 << 20;

/// Of an engine whose programs are the weights that are there anyway, nothing else is believed for being kept on disk.
#[test]
fn programs_on_disk_hold_what_they_hold_without() {
    let dir = tempdir().expect("a folder");
    let soft: Arc<dyn NpuBackend> = Arc::new(Soft::start(SoftOptions::default()).expect("it starts"));
    assert!(soft.shares_weights() && !Compiler::new("1").shares_weights());
    assert!(Cached::open(soft, dir.path(), ROOMY).expect("opens").shares_weights());
    assert!(!open(&Compiler::new("1"), &dir.path().join("other"), ROOMY).shares_weights());
}

fn open(compiler: &Arc<Compiler>, dir: &Path, limit: u64) -> Cached {
    Cached::open(Arc::clone(compiler) as Arc<dyn NpuBackend>, dir, limit).expect("opens")
}

fn weights(seed: usize, rows: usize, cols: usize) -> Arc<ChannelWeights> {
    let number = |i: usize| ((i * 7919 + seed * 31) % 1021) as f32 - 510.0;
    let bytes: Vec<u8> = (0..rows * cols).flat_map(|i| number(i).to_le_bytes()).collect();
    let parts = [SharedBytes::new(bytes), SharedBytes::empty(), SharedBytes::empty()];
    let tensor = StoredTensor::new(Format::F32, rows, cols, parts).expect("the parts fit");
    Arc::new(ChannelWeights::pack_channels(Ctx::serial(), &tensor))
}

fn product(seed: usize, tile: usize, groups: usize, end: usize) -> Procedure {
    let product = Product { weights: weights(seed, 32, 32), channels: 0..end };
    let body = Body::Products { groups, products: vec![product] };
    Procedure { id: ProcedureId(0), name: "p".to_owned(), tile, body }
}

fn expert(limit: Option<f32>) -> Procedure {
    let [w1, w2, w3] = [1, 2, 3].map(|seed| weights(seed, 32, 32));
    Procedure { id: ProcedureId(0), name: "e".to_owned(), tile: 64, body: Body::SharedExpert { w1, w2, w3, limit } }
}

fn counts(cached: &Cached) -> CompileCounts {
    cached.compile_counts().expect("it counts")
}

/// Files that hold programs.
fn files(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).expect("readable").map(|entry| entry.expect("there").path());
    let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == "npu")).collect();
    files.sort();
    files
}

#[test]
fn a_restart_compiles_nothing_and_finds_what_was_compiled() {
    let dir = tempdir().expect("a folder");
    let procedures = [product(1, 64, 1, 32), product(1, 64, 1, 16), expert(None)];
    let compiler = Compiler::new("1");
    let first = open(&compiler, dir.path(), ROOMY);
    let programs = procedures.each_ref().map(|procedure| first.compile(procedure).expect("it is compiled"));
    assert_eq!(counts(&first), CompileCounts { compiled: 3, ..CompileCounts::default() });
    drop(first);
    assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 4, "three programs and the lock");
    let again = open(&compiler, dir.path(), ROOMY);
    assert_eq!(procedures.each_ref().map(|procedure| again.compile(procedure).expect("it is there")), programs);
    assert_eq!(counts(&again), CompileCounts { from_disk: 3, ..CompileCounts::default() });
    assert_eq!(compiler.compilations.load(Ordering::SeqCst), 3);
}

/// Whatever a program depends on is in its name.
#[test]
fn nothing_is_taken_for_something_else() {
    let dir = tempdir().expect("a folder");
    let different = [
        product(1, 64, 1, 32),
        product(2, 64, 1, 32),
        product(1, 128, 1, 32),
        product(1, 64, 1, 24),
        product(1, 64, 2, 16),
        expert(None),
        expert(Some(7.0)),
        expert(Some(8.0)),
    ];
    let cached = open(&Compiler::new("1"), dir.path(), ROOMY);
    different.iter().for_each(|procedure| drop(cached.compile(procedure).expect("it is compiled")));
    let other = open(&Compiler::new("2"), dir.path(), ROOMY);
    other.compile(&different[0]).expect("it is compiled");
    assert_eq!((counts(&cached).compiled, counts(&other).compiled), (8, 1));
    assert_eq!(files(dir.path()).len(), 9);
    // What is the same but for its number and name is the same.
    let same = Procedure { id: ProcedureId(9), name: "another".to_owned(), ..product(1, 64, 1, 32) };
    cached.compile(&same).expect("it is there");
    assert_eq!(counts(&cached).from_disk, 1);
}

#[test]
fn damaged_files_are_compiled_anew() {
    let dir = tempdir().expect("a folder");
    let compiler = Compiler::new("1");
    let (one, two) = (product(1, 64, 1, 32), product(2, 64, 1, 32));
    let cached = open(&compiler, dir.path(), ROOMY);
    let want = cached.compile(&one).expect("it is compiled");
    let [file] = &files(dir.path())[..] else { panic!("one program, one file") };
    let whole = fs::read(file).expect("readable");
    // Of every part of the file: magic, version, zeros, sizes, name, digest, program.
    let mut damages: Vec<Vec<u8>> = [0, 8, 12, 16, 24, 32, 64, 96, whole.len() - 1]
        .map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            bytes
        })
        .to_vec();
    damages.extend([0, 50, 96, whole.len() - 1].map(|len| whole[..len].to_vec()));
    damages.push([&whole[..], &[0]].concat());
    for (number, bytes) in damages.iter().enumerate() {
        fs::write(file, bytes).expect("writable");
        let again = cached.compile(&one).expect("it is compiled again");
        assert_ne!(again.blob, want.blob, "damage {number}: another compilation");
        assert_eq!((again.blob.len(), again.resident_bytes), (1000, want.resident_bytes));
        assert_eq!(counts(&cached).damaged, number as u64 + 1);
    }
    // Another procedure's file under this one's name.
    cached.compile(&two).expect("it is compiled");
    let other = files(dir.path()).into_iter().find(|other| other != file).expect("two files");
    fs::copy(other, file).expect("copied");
    cached.compile(&one).expect("it is compiled again");
    assert_eq!(counts(&cached).damaged, damages.len() as u64 + 1);
    assert_eq!(counts(&cached).from_disk, 0);
}

#[test]
fn what_was_used_longest_ago_makes_room() {
    let dir = tempdir().expect("a folder");
    let compiler = Compiler::new("1");
    let procedures = [1, 2, 3, 4].map(|seed| product(seed, 64, 1, 32));
    // Three files of 1,096 bytes.
    let cached = open(&compiler, dir.path(), 3300);
    let mut paths: Vec<PathBuf> = Vec::new();
    for (age, procedure) in (0..3).rev().zip(&procedures) {
        cached.compile(procedure).expect("it is compiled");
        let new = files(dir.path()).into_iter().find(|path| !paths.contains(path)).expect("a new file");
        let used = SystemTime::now() - Duration::from_secs(1000 * (age + 1));
        File::open(&new).and_then(|file| file.set_modified(used)).expect("it is ours");
        paths.push(new);
    }
    // The oldest one is used, so the second goes.
    cached.compile(&procedures[0]).expect("it is there");
    cached.compile(&procedures[3]).expect("it is compiled");
    assert!(paths[0].exists() && !paths[1].exists() && paths[2].exists());
    assert_eq!(files(dir.path()).len(), 3);
    assert_eq!((counts(&cached).evicted, counts(&cached).from_disk), (1, 1));
    // Larger than the limit: nothing goes for it.
    let small = open(&compiler, dir.path(), 1000);
    small.compile(&procedures[1]).expect("it is compiled");
    assert_eq!((counts(&small).not_kept, counts(&small).evicted, files(dir.path()).len()), (1, 0, 3));
}

/// As after a change of a driver that no version tells of.
#[test]
fn what_the_engine_does_not_take_any_more_is_compiled_again() {
    let dir = tempdir().expect("a folder");
    let compiler = Compiler::new("1");
    let procedures = [1, 2].map(|seed| Arc::new(product(seed, 64, 1, 32)));
    let programs = |cached: &Cached| -> Vec<Program> {
        let compile = |procedure: &Procedure| Arc::new(cached.compile(procedure).expect("it is compiled"));
        procedures.iter().map(|procedure| (Arc::clone(procedure), compile(procedure))).collect()
    };
    let first = open(&compiler, dir.path(), ROOMY);
    first.load(0, &programs(&first)).expect("it takes its own");
    compiler.accepted_from.store(2, Ordering::SeqCst);
    assert!(first.load(0, &programs(&first)[..1]).is_ok(), "from disk, and compiled again");
    assert_eq!((counts(&first).from_disk, counts(&first).refused), (2, 1));
    let again = open(&compiler, dir.path(), ROOMY);
    again.load(0, &programs(&again)).expect("both are compiled again: nobody says which one it was");
    assert_eq!((counts(&again).from_disk, counts(&again).refused), (2, 2));
    let third = open(&compiler, dir.path(), ROOMY);
    third.load(0, &programs(&third)).expect("it takes the new files");
    assert_eq!((counts(&third).from_disk, counts(&third).refused), (2, 0));
    // What was compiled just now and is refused is not compiled once more.
    compiler.accepted_from.store(u64::MAX, Ordering::SeqCst);
    let fresh = open(&compiler, dir.path(), 0);
    let own = [(Arc::clone(&procedures[0]), Arc::new(compiler.compile(&procedures[0]).expect("it is compiled")))];
    assert!(fresh.load(0, &own).is_err());
    assert_eq!(counts(&fresh).refused, 0);
}

/// A folder of a process that lives stays, those of others go.
#[test]
fn leftovers_of_processes_that_ended_are_removed() {
    let dir = tempdir().expect("a folder");
    let compiler = Compiler::new("1");
    let staging = |dir: &Path| -> Vec<PathBuf> {
        let paths = fs::read_dir(dir).expect("readable").map(|entry| entry.expect("there").path());
        paths.filter(|path| path.is_dir()).collect()
    };
    let running = open(&compiler, dir.path(), ROOMY);
    let [own] = &staging(dir.path())[..] else { panic!("one folder") };
    for name in ["staging-1-0", "staging-4711-3"] {
        fs::create_dir(dir.path().join(name)).expect("made");
        fs::write(dir.path().join(name).join("x.npu"), [0; 100]).expect("written");
    }
    fs::write(dir.path().join("staging-1-0").join("lock"), []).expect("written");
    fs::create_dir(dir.path().join("foreign")).expect("made");
    let second = open(&compiler, dir.path(), ROOMY);
    assert_eq!((counts(&second).leftovers, counts(&running).leftovers), (2, 0));
    assert!(own.is_dir() && dir.path().join("foreign").is_dir());
    assert_eq!(staging(dir.path()).len(), 3, "two of ours, one that is none");
    // Both still write.
    running.compile(&product(1, 64, 1, 32)).expect("it is compiled");
    second.compile(&product(2, 64, 1, 32)).expect("it is compiled");
    assert_eq!(files(dir.path()).len(), 2);
    drop((running, second));
    assert_eq!(staging(dir.path()), [dir.path().join("foreign")]);
}

#[test]
fn a_folder_that_cannot_be_written_costs_a_compilation() {
    let dir = tempdir().expect("a folder");
    let compiler = Compiler::new("1");
    let in_the_way = dir.path().join("file");
    fs::write(&in_the_way, []).expect("written");
    let error = Cached::open(Arc::clone(&compiler) as Arc<dyn NpuBackend>, &in_the_way, ROOMY);
    assert!(error.is_err(), "it is no folder");
    let folder = dir.path().join("programs");
    let cached = open(&compiler, &folder, ROOMY);
    fs::remove_dir_all(&folder).expect("removable");
    (0..2).for_each(|_| drop(cached.compile(&product(1, 64, 1, 32)).expect("it is compiled")));
    assert_eq!((counts(&cached).compiled, counts(&cached).not_kept), (2, 2));
}
