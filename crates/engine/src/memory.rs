//! How much memory serving a model will take, from its checkpoint and settings alone. Nothing is loaded.

use std::collections::{BTreeMap, BTreeSet};

use troika_base::NumericClass;
use troika_device::cpu::weight_memory;
use troika_graph::Scope;
use troika_model::config::LayerKind;
use troika_model::weights::WeightClass;
use troika_model::{Emitter, ModelConfig, WeightTable};

use crate::engine::speculate::decode_bytes;
use crate::runner::{draft_bytes, state_shape, step_bytes};

/// What is served, and how.
#[derive(Clone, Copy, Debug)]
pub struct MemorySettings {
    /// The arithmetic.
    pub class: NumericClass,
    /// Prompt tokens computed in one step.
    pub chunk_tokens: usize,
    /// Steps of prompts in flight.
    pub wavefront: usize,
    /// Sequences held at once.
    pub sequences: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Threads that compute.
    pub threads: usize,
    /// Whether the drafter works.
    pub drafter: bool,
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
    /// Values of the steps of prompts in flight, and of one that decodes.
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
            let is_read = settings.drafter || !matches!(key.scope, Scope::Stage(_));
            if memory.stays_mapped && is_read {
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
        let shape = state_shape(config, &facts, settings.class, settings.drafter);
        let emitter = Emitter::new(config.clone(), facts);
        let values = |rows, logit_rows| step_bytes(&emitter, settings.class, settings.drafter, rows, logit_rows);
        let block = config.dspark.as_ref().filter(|_| settings.drafter).map_or(0, |dspark| dspark.block_size);
        let drafts = |sequences| draft_bytes(&emitter, settings.class, sequences);
        let decode = decode_bytes(settings.sequences, block, values, drafts);
        let block_tokens = shape.block_tokens();
        let blocks = settings.tokens.div_ceil(block_tokens) as u64;
        let per_sequence = shape.fixed_bytes() + shape.bytes_per_block() * blocks;
        Self {
            mapped_neighbours: windows.bytes().saturating_sub(mapped.values().sum()),
            mapped_weights: mapped,
            copied_weights: copied,
            // Prompts of two tokens at least may end in the step, and have logits.
            step_values: values(settings.chunk_tokens, settings.sequences.min(settings.chunk_tokens.div_ceil(2)))
                * settings.wavefront as u64
                + decode,
            scratch: scratch_bytes(config, settings),
            state_fixed: shape.fixed_bytes(),
            state_per_1000_tokens: shape.bytes_per_block() * 1000 / block_tokens as u64,
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

/// What kernels keep for the next call: rows of routed experts, rounded rows of the widest product, for products in `f32` the rows
/// of a task, packed by each thread, and scores of the sequence they work on.
fn scratch_bytes(config: &ModelConfig, settings: &MemorySettings) -> u64 {
    /// Most rows (token and expert) that routed experts compute together: of integer products, of others.
    const BATCH: [usize; 2] = [1024, 512];
    /// Most rows and numbers that a task packs; of more, it packs a block of columns at a time. A product with few outputs, as
    /// the router's, is cut along its rows.
    const PACKED: [usize; 2] = [480, 1 << 20];
    const BLOCK: usize = 256;
    const CUT_ROWS: usize = 96;
    let (dim, inner) = (config.hidden_size, config.moe_intermediate_size);
    let heads = config.num_attention_heads * config.head_dim;
    let rows = settings.chunk_tokens;
    let entries = rows * config.num_experts_per_tok;
    let packed = |rows: usize, cols: usize| {
        let rows = rows.min(PACKED[0]);
        settings.threads * 4 * rows * if rows * cols <= PACKED[1] { cols } else { BLOCK }
    };
    let bytes = if settings.class.has_integer_products() {
        // Codes of a byte, a scale and two sums of four bytes for 32 of them.
        let rounded = |numbers: usize| numbers / 32 * 44;
        let batch = entries.min(BATCH[0]);
        batch * 4 * (dim + inner) + rounded((batch * (dim + inner)).max(rows * heads)) + packed(rows.min(CUT_ROWS), dim)
    } else {
        let batch = entries.min(BATCH[1]);
        let widths = [dim, inner, heads / config.o_groups, config.o_groups * config.o_lora_rank];
        batch * 4 * (dim + 2 * inner) + widths.map(|cols| packed(rows, cols)).into_iter().max().unwrap_or(0)
    };
    (bytes + sequence_scratch_bytes(config, settings)) as u64
}

/// The part of that which grows with a sequence: the scores of index keys, four queries for each thread.
fn sequence_scratch_bytes(config: &ModelConfig, settings: &MemorySettings) -> usize {
    /// Numbers of four bytes that each thread keeps of a key: scores of four queries, ranks, numbers and ranks of the close ones.
    const PER_KEY: usize = 7;
    /// Tokens of a compressed row in layers that choose among them.
    const CSA_RATIO: usize = 4;
    let chooses = (0..config.num_hidden_layers).any(|layer| config.layer_kind(layer) == LayerKind::Csa);
    let keys = if chooses { settings.tokens / CSA_RATIO } else { 0 };
    if keys > config.index_topk { settings.threads * keys * PER_KEY * 4 } else { 0 }
}
