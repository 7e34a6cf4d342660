//! Text in, tokens out, and back, compared with the tokenizers library and with plain whole-text versions.

mod chat;
mod streams;
mod tokenizer;

use std::sync::Arc;

use troika_prompt::Tokenizer;
use troika_testkit::tokenizer::TokenizerSpec;

fn load(spec: &TokenizerSpec) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_bytes("tokenizer.json", &spec.to_json()).expect("the test tokenizer loads"))
}

/// What the library makes of a rendered prompt when it matches the markers itself.
fn library_ids(spec: &TokenizerSpec, text: &str) -> Vec<u32> {
    let library = tokenizers::Tokenizer::from_bytes(spec.to_json()).expect("the test tokenizer loads");
    library.encode(text, false).expect("the text encodes").get_ids().to_vec()
}
