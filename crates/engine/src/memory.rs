//! How much memory serving a model will take, from its checkpoint and settings alone. Nothing is loaded.

use std::collections::{BTreeMap, BTreeSet};

use troika_base::NumericClass;
use troika_device::cpu::weight_memory;
use troika_graph::Scope;
use troika_model::weights::WeightClass;
use troika_model::{Emitter, ModelConfig, WeightTable};

use crate::runner::{state_shape, step_bytes};

/// What is served, and how.
#[derive(Clone, Copy, Debug)]
pub struct MemorySettings {
    /// The arithmetic.
    pub class: NumericClass,
    /// Prompt tokens computed in one step.
    pub chunk_tokens: usize,
    /// Sequences held at once.
    pub sequences: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Threads that compute.
    pub threads: usize,
}

/// Resident bytes of a model that is served, once every weight was read. What the process needs besides, and kept prefixes, come
/// on top.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ModelMemory {
    /// Stored weights that are read with the steps, by class: pages of the mapped files.
    pub mapped_weights: BTreeMap<WeightClass, u64>,
    /// Pages of the mapped files that come with those, since the system maps them in windows of 64 KiB.
    pub mapped_neighbours: u64,
    /// Copies in the form that products want, by class.
    pub copied_weights: BTreeMap<WeightClass, u64>,
    /// Values of a step of a prompt, and of one that decodes.
    pub step_values: u64,
    /// What kernels keep from one call to the next.
    pub scratch: u64,
    /// State of a sequence whatever its length.
    pub state_fixed: u64,
    /// State of a sequence for every 1000 tokens.
    pub state_per_1000_tokens: u64,
    /// State of all sequences.
    pub state: u64,
}

impl ModelMemory {
    /// Foresees the memory of `weights` served with `settings`.
    pub fn foresee(config: &ModelConfig, weights: &WeightTable, settings: &MemorySettings) -> Self {
        let facts = weights.facts();
        let (mut mapped, mut copied) = (BTreeMap::new(), BTreeMap::new());
        let mut windows = Windows::default();
        for (key, tensor) in weights.iter() {
            let memory = weight_memory(settings.class, key.role, tensor);
            // Serving runs no drafter.
            if memory.stays_mapped && !matches!(key.scope, Scope::Stage(_)) {
                *mapped.entry(WeightClass::of(key)).or_default() += tensor.num_bytes();
                windows.touch([tensor.data(), tensor.scales(), tensor.biases()]);
            } else if memory.stays_mapped {
                // Opening a checkpoint looks at all its scales.
                windows.touch([&[], tensor.scales(), tensor.biases()]);
            }
            if memory.copied_bytes > 0 {
                *copied.entry(WeightClass::of(key)).or_default() += memory.copied_bytes;
            }
        }
        let shape = state_shape(config, &facts);
        let emitter = Emitter::new(config.clone(), facts);
        let values = |rows, logit_rows| step_bytes(&emitter, settings.class, false, rows, logit_rows);
        let block = shape.block_tokens();
        let per_sequence = shape.fixed_bytes() + shape.bytes_per_block() * settings.tokens.div_ceil(block) as u64;
        Self {
            mapped_neighbours: windows.bytes().saturating_sub(mapped.values().sum()),
            mapped_weights: mapped,
            copied_weights: copied,
            step_values: values(settings.chunk_tokens, 0) + values(settings.sequences, settings.sequences),
            scratch: scratch_bytes(config, settings),
            state_fixed: shape.fixed_bytes(),
            state_per_1000_tokens: shape.bytes_per_block() * 1000 / block as u64,
            state: per_sequence * settings.sequences as u64,
        }
    }

    /// Bytes that are pages of files: the system may take them back and read them again.
    pub fn file_bytes(&self) -> u64 {
        self.mapped_weights.values().sum::<u64>() + self.mapped_neighbours
    }

    /// Bytes that are nowhere else.
    pub fn anonymous_bytes(&self) -> u64 {
        self.copied_weights.values().sum::<u64>() + self.step_values + self.scratch + self.state
    }
}

/// The windows of mapped files that are touched: a page that is read brings its neighbours if the system has them.
#[derive(Default)]
struct Windows(BTreeSet<usize>);

impl Windows {
    const BYTES: usize = 64 << 10;

    fn touch(&mut self, parts: [&[u8]; 3]) {
        for part in parts {
            let start = part.as_ptr().addr();
            if !part.is_empty() {
                self.0.extend(start / Self::BYTES..=(start + part.len() - 1) / Self::BYTES);
            }
        }
    }

    fn bytes(&self) -> u64 {
        (self.0.len() * Self::BYTES) as u64
    }
}

/// What kernels keep for the next call: rows of routed experts, rounded rows of the widest product, and for products in `f32`
/// the rows of a task, packed by each thread.
fn scratch_bytes(config: &ModelConfig, settings: &MemorySettings) -> u64 {
    /// Most rows (token and expert) that routed experts compute together: of integer products, of others.
    const BATCH: [usize; 2] = [1024, 512];
    /// Most rows and numbers that a task packs.
    const PACKED: [usize; 2] = [480, 1 << 20];
    let (dim, inner) = (config.hidden_size, config.moe_intermediate_size);
    let heads = config.num_attention_heads * config.head_dim;
    let rows = settings.chunk_tokens;
    let entries = rows * config.num_experts_per_tok;
    let packed = |cols: usize| settings.threads * 4 * (rows.min(PACKED[0]) * cols).min(PACKED[1]);
    let bytes = if settings.class.has_integer_products() {
        // Codes of a byte, a scale and a sum of four bytes for 32 of them.
        let rounded = |numbers: usize| numbers / 32 * 40;
        let batch = entries.min(BATCH[0]);
        batch * 4 * (dim + inner) + rounded((batch * (dim + inner)).max(rows * heads)) + packed(dim)
    } else {
        let batch = entries.min(BATCH[1]);
        let widest = dim.max(heads / config.o_groups).max(config.o_groups * config.o_lora_rank);
        batch * 4 * (dim + 2 * inner) + packed(widest)
    };
    bytes as u64
}
