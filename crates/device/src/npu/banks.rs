//! Bringing compiled procedures onto an engine: banks under a byte window, and what happens if the engine refuses one
//! (section 6 of the hybrid spec).

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Bank, NpuBackend, NpuError, ProcedureId, Program};

/// A bank never has to be smaller than this before procedures are dropped.
const SMALLEST_BANK: u64 = 1 << 30;
/// Ways to cut the procedures into banks that are tried before some are dropped.
const MAX_ATTEMPTS: usize = 4;

/// Procedures to load.
#[derive(Clone, Debug)]
pub struct BankOptions {
    /// Per instance its procedures, in the same order and number on each; those at one place belong to one projection.
    pub programs: Vec<Vec<Program>>,
    /// Per place what the projection saves, in any unit: the least goes first.
    pub benefits: Vec<f64>,
}

/// The banks of one instance, each with the procedures in it.
pub type InstanceBanks = Vec<(Vec<ProcedureId>, Box<dyn Bank>)>;

/// The banks of every instance.
pub struct Banks {
    /// One entry per instance.
    pub instances: Vec<InstanceBanks>,
    /// Places that are in one bank together.
    pub spans: Vec<Vec<usize>>,
    /// Places whose procedures were left out.
    pub dropped: Vec<usize>,
    /// Ways to cut that were tried.
    pub attempts: usize,
    /// What the engine said to the last one that failed.
    pub last_error: Option<NpuError>,
    /// Bytes of all banks.
    pub resident_bytes: u64,
}

/// Loads `options` onto the instances of `backend`: all in one bank; if that fails in smaller and smaller ones; then without
/// the procedures that save least. Every instance gets the same places.
pub fn load_banks(backend: &dyn NpuBackend, options: &BankOptions) -> Banks {
    let sizes: Vec<u64> = (0..options.benefits.len()).map(|place| place_bytes(options, place)).collect();
    let window = backend.limits().bank_bytes;
    let mut kept: Vec<usize> = (0..options.benefits.len()).collect();
    let mut dropped = Vec::new();
    let (mut cap, mut attempts, mut last_error) = (window, 0, None);
    while !kept.is_empty() {
        attempts += 1;
        let spans = spans(&kept, &sizes, cap);
        match attempt(backend, options, &spans) {
            Ok(instances) => {
                let resident =
                    |programs: &Vec<Program>| kept.iter().map(|i| programs[*i].1.resident_bytes).sum::<u64>();
                let resident_bytes = options.programs.iter().map(resident).sum();
                return Banks { instances, spans, dropped, attempts, last_error, resident_bytes };
            }
            Err(error) => {
                tracing::info!(%error, attempts, "a bank was refused");
                last_error = Some(error);
            }
        }
        if attempts == 1 {
            let total: u64 = kept.iter().map(|place| sizes[*place]).sum();
            let largest = kept.iter().map(|place| sizes[*place]).max().unwrap_or(0);
            cap = window.min(total / 2 + largest);
        } else if attempts < MAX_ATTEMPTS {
            cap = (cap / 2).min(SMALLEST_BANK);
        } else {
            let least =
                (0..kept.len()).min_by(|a, b| options.benefits[kept[*a]].total_cmp(&options.benefits[kept[*b]]));
            dropped.push(kept.remove(least.expect("some are kept")));
        }
    }
    let instances = options.programs.iter().map(|_| Vec::new()).collect();
    Banks { instances, spans: Vec::new(), dropped, attempts, last_error, resident_bytes: 0 }
}

/// Bytes of a place on the instance where it is largest.
fn place_bytes(options: &BankOptions, place: usize) -> u64 {
    options.programs.iter().map(|programs| programs[place].1.resident_bytes).max().unwrap_or(0)
}

/// Consecutive places that fit `cap` together; at least one each.
fn spans(kept: &[usize], sizes: &[u64], cap: u64) -> Vec<Vec<usize>> {
    let mut spans: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for place in kept {
        match spans.last_mut() {
            Some(span) if bytes + sizes[*place] <= cap => {
                span.push(*place);
                bytes += sizes[*place];
            }
            _ => {
                spans.push(vec![*place]);
                bytes = sizes[*place];
            }
        }
    }
    spans
}

/// A span that loads on some instances only is unloaded, with everything else: its banks are dropped with the error.
fn attempt(
    backend: &dyn NpuBackend,
    options: &BankOptions,
    spans: &[Vec<usize>],
) -> Result<Vec<InstanceBanks>, NpuError> {
    let mut instances = Vec::new();
    for (instance, all) in options.programs.iter().enumerate() {
        let mut banks = Vec::new();
        for span in spans {
            let programs: Vec<Program> =
                span.iter().map(|place| (Arc::clone(&all[*place].0), Arc::clone(&all[*place].1))).collect();
            let ids: Vec<ProcedureId> = programs.iter().map(|(procedure, _)| procedure.id).collect();
            debug_assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "procedures are unique");
            banks.push((ids, backend.load(instance, &programs)?));
        }
        instances.push(banks);
    }
    Ok(instances)
}
