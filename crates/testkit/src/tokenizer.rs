//! A byte-level `tokenizer.json`, made when a test runs.

use serde_json::{Map, Value, json};

/// The markers of a DeepSeek-V4 conversation.
pub const MARKERS: [&str; 7] = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
];

/// What a tokenizer file should have.
#[derive(Clone, Debug)]
pub struct TokenizerSpec {
    /// Added tokens, numbered from 256.
    pub markers: Vec<&'static str>,
    /// Whether the markers carry the `special` flag; published files leave it off for some.
    pub markers_are_special: bool,
    /// Merges of the byte-level alphabet, most important first; their products are numbered after the markers.
    pub merges: Vec<(&'static str, &'static str)>,
    /// Split text the way the published tokenizer does before merging.
    pub split: bool,
    /// Whether a piece that is in the vocabulary is one token, whatever the merges say.
    pub ignore_merges: bool,
}

impl TokenizerSpec {
    /// All markers, a few merges, no splitting.
    pub fn plain() -> Self {
        let merges = vec![("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ä", "½"), ("ð", "Ł")];
        Self { markers: MARKERS.to_vec(), markers_are_special: true, merges, split: false, ignore_merges: false }
    }

    /// The file.
    pub fn to_json(&self) -> Vec<u8> {
        let mut texts: Vec<String> = byte_alphabet().into_iter().map(String::from).collect();
        texts.extend(self.markers.iter().map(|marker| (*marker).to_owned()));
        texts.extend(self.merges.iter().map(|(left, right)| format!("{left}{right}")));
        let vocab: Map<String, Value> = texts.into_iter().zip(0u32..).map(|(text, id)| (text, id.into())).collect();
        let added: Vec<Value> =
            self.markers.iter().zip(256u32..).map(|(marker, id)| self.added_token(marker, id)).collect();
        let merges: Vec<Value> = self.merges.iter().map(|(left, right)| json!([left, right])).collect();
        let mut pretokenizers = Vec::new();
        if self.split {
            pretokenizers.extend(SPLITS.iter().map(|pattern| {
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
            }));
        }
        pretokenizers
            .push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}));
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": []},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pretokenizers},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": self.ignore_merges, "vocab": vocab, "merges": merges,
            },
        });
        file.to_string().into_bytes()
    }

    fn added_token(&self, content: &str, id: u32) -> Value {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": self.markers_are_special,
        })
    }
}

/// The patterns of the published tokenizer, as section 13.1 of the model spec describes them.
const SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// Letter of each byte; token ids 0 to 255 are the bytes themselves.
fn byte_alphabet() -> Vec<char> {
    let mut spare = '\u{100}'..;
    let letter = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => spare.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    };
    (0..=255u8).map(letter).collect()
}
