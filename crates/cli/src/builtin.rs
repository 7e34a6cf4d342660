//! The model that comes along: nano, inside the program, so that it is found wherever the program is installed.

use troika_base::SharedBytes;
use troika_model::{Checkpoint, CheckpointError};

macro_rules! nano {
    ($include:ident, $file:literal) => {
        $include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano/", $file))
    };
}

/// What clients call it.
pub(crate) const NAME: &str = "nano";
pub(crate) const TOKENIZER: &[u8] = nano!(include_bytes, "tokenizer.json");
pub(crate) const GENERATION_CONFIG: &str = nano!(include_str, "generation_config.json");
pub(crate) const PROMPT_TEXTS: &str = nano!(include_str, "encoding/encoding_dsv4.py");
const CONFIG: &str = nano!(include_str, "config.json");
/// In a constant, every use would have its own copy.
static WEIGHTS: &[u8] = nano!(include_bytes, "model.safetensors");

pub(crate) fn checkpoint() -> Result<Checkpoint, CheckpointError> {
    Checkpoint::from_parts(CONFIG, &[("model.safetensors of nano".to_owned(), SharedBytes::new(WEIGHTS))])
}
