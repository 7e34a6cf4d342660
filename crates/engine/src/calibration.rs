//! Measuring what projections cost before a model is loaded: with the weights of one projection of each kind and shape.

use std::collections::BTreeSet;
use std::sync::Arc;

use troika_base::{NumericClass, StoredTensor};
use troika_device::Device;
use troika_device::cpu::{CpuDevice, CpuOptions};
use troika_device::npu::NpuBackend;
use troika_graph::{WeightKey, WeightSource};
use troika_model::{Emitter, ModelConfig, ModelFacts};
use troika_runtime::cost::{Bench, CalibrationError, CostTable, calibrate, representatives};

use crate::runner::tile_graph;

/// Some weights of a source.
struct Only<'a> {
    source: &'a dyn WeightSource,
    keys: BTreeSet<WeightKey>,
}

impl WeightSource for Only<'_> {
    fn tensor(&self, key: WeightKey) -> Option<StoredTensor> {
        self.keys.contains(&key).then(|| self.source.tensor(key)).flatten()
    }

    fn keys(&self) -> Vec<WeightKey> {
        self.source.keys().into_iter().filter(|key| self.keys.contains(key)).collect()
    }
}

/// Who is to be measured.
pub struct Calibration<'a> {
    /// The engines.
    pub backend: &'a Arc<dyn NpuBackend>,
    /// Rows of a tile.
    pub tile: usize,
    /// The primary device beside the engines.
    pub cpu: CpuOptions,
    /// The primary device if engines take no part.
    pub cpu_alone: CpuOptions,
}

/// Measures every kind and shape of projection in class `fast`, the one that engines go with. `progress` hears how many of
/// how many are done.
///
/// # Errors
///
/// If a device cannot be started, or cannot do what it is to be measured with.
pub fn calibrate_engines(
    config: ModelConfig,
    facts: ModelFacts,
    weights: &dyn WeightSource,
    calibration: &Calibration<'_>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CostTable, CalibrationError> {
    let Calibration { backend, tile, cpu, cpu_alone } = calibration;
    let graph = tile_graph(&Emitter::new(config, facts), NumericClass::Fast, *tile);
    let measured = representatives(&graph, weights, &***backend);
    let keys = measured.iter().flat_map(|(projection, _)| projection.weights.iter().map(|weight| weight.key)).collect();
    let primary = CpuDevice::start(*cpu, NumericClass::Fast)?;
    primary.load(&Only { source: weights, keys })?;
    let alone = CpuDevice::start(*cpu_alone, NumericClass::Fast)?;
    alone.load(&Only { source: weights, keys: BTreeSet::new() })?;
    let pack = |tensor: &StoredTensor| primary.pack_channels(tensor);
    calibrate(&graph, weights, &Bench { primary: &primary, alone: &alone, backend, pack: &pack }, progress)
}
