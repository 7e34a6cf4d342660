//! Text in, tokens out, and back, compared with the tokenizers library and with plain whole-text versions.

mod chat;
mod constraint;
mod output;
mod streams;
mod tokenizer;

use std::path::Path;
use std::sync::Arc;

use troika_prompt::{FixedTexts, Tokenizer};
use troika_testkit::tokenizer::{MARKERS, TokenizerSpec};

fn load(spec: &TokenizerSpec) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_bytes("tokenizer.json", &spec.to_json()).expect("the test tokenizer loads"))
}

/// The markers have the ids 256 to 263, the last one is `<｜latest_reminder｜>`.
fn spec_with_reminder() -> TokenizerSpec {
    let markers = MARKERS.into_iter().chain(["<｜latest_reminder｜>"]).collect();
    TokenizerSpec { markers, ..TokenizerSpec::plain() }
}

/// The fixed texts of `tests/data`.
fn texts() -> FixedTexts {
    FixedTexts::from_checkpoint(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data"))
}

/// What the library makes of a rendered prompt when it matches the markers itself.
fn library_ids(spec: &TokenizerSpec, text: &str) -> Vec<u32> {
    let library = tokenizers::Tokenizer::from_bytes(spec.to_json()).expect("the test tokenizer loads");
    library.encode(text, false).expect("the text encodes").get_ids().to_vec()
}
