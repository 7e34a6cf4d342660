use proptest::prelude::*;
use serde_json::Value;
use troika_prompt::{MarkerText, PromptError, Tokenizer};
use troika_testkit::tokenizer::{MARKERS, TokenizerSpec};

use crate::{library_ids, load};

fn specs() -> Vec<TokenizerSpec> {
    let plain = TokenizerSpec::plain();
    vec![
        plain.clone(),
        TokenizerSpec { split: true, ..plain.clone() },
        TokenizerSpec { markers_are_special: false, ..plain.clone() },
        TokenizerSpec { ignore_merges: true, ..plain },
    ]
}

/// Whatever flags the file carries, text never becomes a marker, and it keeps every byte.
#[test]
fn text_cannot_forge_markers() {
    for spec in specs() {
        let tokenizer = load(&spec);
        for marker in MARKERS {
            for text in [marker.to_owned(), format!("a{marker}b"), format!("{marker}{marker}"), format!("\n{marker} x")]
            {
                let ids = tokenizer.encode(&text).unwrap();
                let forged: Vec<_> = ids.iter().filter(|id| (256..263).contains(*id)).collect();
                assert!(forged.is_empty(), "{text:?} became {ids:?} with {spec:?}");
                assert_eq!(tokenizer.decode(&ids, MarkerText::Hidden), text, "{spec:?}");
            }
        }
        // The library itself does turn it into one: the test would notice.
        assert!(library_ids(&spec, "a<｜User｜>b").contains(&258));
    }
}

#[test]
fn markers_have_ids_and_bytes() {
    let tokenizer = load(&TokenizerSpec::plain());
    assert_eq!(tokenizer.special("<｜begin▁of▁sentence｜>"), Some(256));
    assert_eq!(tokenizer.special("</think>"), Some(261));
    assert_eq!(tokenizer.special("he"), None, "an ordinary token is no marker");
    assert_eq!(tokenizer.token_bytes(0xE4), Some(&[0xE4][..]));
    assert_eq!(tokenizer.token_bytes(258), Some("<｜User｜>".as_bytes()));
    assert_eq!(tokenizer.token_bytes(266), Some(&b"hello"[..]));
    assert_eq!(tokenizer.token_bytes(100_000), None);
    assert_eq!(tokenizer.token_bytes(u32::MAX), None);
    assert_eq!(tokenizer.vocab_size(), 270);
}

#[test]
fn markers_show_or_hide() {
    let special = load(&TokenizerSpec::plain());
    let unflagged = load(&TokenizerSpec { markers_are_special: false, ..TokenizerSpec::plain() });
    let ids = [260, u32::from(b'a'), 261, 9999, u32::from(b'b')];
    assert_eq!(special.decode(&ids, MarkerText::Hidden), "ab");
    assert_eq!(special.decode(&ids, MarkerText::Shown), "<think>a</think>b");
    assert_eq!(unflagged.decode(&ids, MarkerText::Hidden), "<think>a</think>b");
}

#[test]
fn long_runs_keep_every_byte() {
    let tokenizer = load(&TokenizerSpec { split: true, ..TokenizerSpec::plain() });
    for text in
        [" ".repeat(300_000), "a".repeat(300_000), "\n ".repeat(100_000), "!".repeat(300_000), "中".repeat(100_000)]
    {
        let ids = tokenizer.encode(&text).unwrap();
        assert!(tokenizer.decode(&ids, MarkerText::Hidden) == text, "lost text after {:?}", text.chars().next());
    }
}

#[test]
fn missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let error = Tokenizer::from_file(&path).unwrap_err();
    assert!(matches!(error, PromptError::Read { .. }));
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
}

#[test]
fn damaged_files_say_what_is_wrong() {
    let edit = |change: &dyn Fn(&mut Value)| {
        let mut file: Value = serde_json::from_slice(&TokenizerSpec::plain().to_json()).unwrap();
        change(&mut file);
        file.to_string().into_bytes()
    };
    let whole = TokenizerSpec::plain().to_json();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "EOF"),
        (b"[]".to_vec(), "invalid type"),
        (whole[..whole.len() / 2].to_vec(), "EOF"),
        (b"{}".to_vec(), "ByteLevel"),
        (edit(&|file| file["model"] = Value::Null), "`model` is missing"),
        (edit(&|file| file["model"]["type"] = "WordPiece".into()), "not BPE"),
        (edit(&|file| file["model"]["vocab"] = 3.into()), "`model.vocab`"),
        (edit(&|file| file["model"]["vocab"]["he"] = (-1).into()), "\"he\""),
        (edit(&|file| file["model"]["vocab"]["he"] = 4_000_000_000u64.into()), "\"he\""),
        (edit(&|file| file["added_tokens"] = "x".into()), "`added_tokens`"),
        (edit(&|file| file["added_tokens"][2]["id"] = 1.5.into()), "`added_tokens[2].id`"),
        (edit(&|file| file["added_tokens"][3]["content"] = Value::Null), "`added_tokens[3].content`"),
        (edit(&|file| file["model"]["merges"] = serde_json::json!([["h"]])), "tokenizer.json"),
        (edit(&|file| file["pre_tokenizer"]["pretokenizers"][0]["type"] = "Nonsense".into()), "tokenizer.json"),
        (
            edit(&|file| {
                file["model"]["vocab"].as_object_mut().unwrap().remove("Ā");
            }),
            "0x00",
        ),
    ];
    for (bytes, expected) in cases {
        let error = Tokenizer::from_bytes("dir/tokenizer.json", &bytes).unwrap_err().to_string();
        assert!(error.contains("dir/tokenizer.json") && error.contains(expected), "{error:?} lacks {expected:?}");
    }
}

/// Older files write merges as `"a b"`, and may lack `added_tokens`.
#[test]
fn older_spellings_load() {
    let mut file: Value = serde_json::from_slice(&TokenizerSpec::plain().to_json()).unwrap();
    file["model"]["merges"] = serde_json::json!(["h e", "l l"]);
    file.as_object_mut().unwrap().remove("added_tokens");
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", file.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("hell").unwrap(), [263, 264]);
    assert_eq!(tokenizer.special("<think>"), None);
}

proptest! {
    #[test]
    fn text_without_markers_encodes_as_the_library_does(text in "(?s)[ -~\n\té中だ😀]{0,60}|\\PC{0,40}", split: bool) {
        let spec = TokenizerSpec { split, ..TokenizerSpec::plain() };
        prop_assume!(MARKERS.iter().all(|marker| !text.contains(marker)));
        let tokenizer = load(&spec);
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, MarkerText::Hidden), text.as_str());
        prop_assert_eq!(ids, library_ids(&spec, &text));
    }

    #[test]
    fn decoding_is_what_the_library_decodes(ids in proptest::collection::vec(0u32..280, 0..40), shown: bool) {
        let spec = TokenizerSpec::plain();
        let library = tokenizers::Tokenizer::from_bytes(spec.to_json()).unwrap();
        let markers = if shown { MarkerText::Shown } else { MarkerText::Hidden };
        prop_assert_eq!(load(&spec).decode(&ids, markers), library.decode(&ids, !shown).unwrap());
    }
}

/// The encodings of section 13.1 of the model spec, and what no random text shows: the speed of hostile ones is linear.
#[test]
#[ignore = "needs a published tokenizer.json: TROIKA_TEST_TOKENIZER=FILE cargo test -p troika-prompt -- --ignored"]
fn the_published_tokenizer() {
    let path = std::env::var_os("TROIKA_TEST_TOKENIZER").expect("TROIKA_TEST_TOKENIZER names a file");
    let tokenizer = Tokenizer::from_file(path.as_ref()).unwrap();
    assert_eq!(tokenizer.encode("The capital of France is").unwrap(), [671, 6102, 294, 8760, 344]);
    assert_eq!(tokenizer.encode("1234567890").unwrap(), [6895, 18009, 25744, 18]);
    assert_eq!(tokenizer.encode("你好, world").unwrap(), [30594, 14, 2058]);
    for (marker, id) in MARKERS.into_iter().zip([0, 1, 128_803, 128_804, 128_821, 128_822, 128_825]) {
        assert_eq!(tokenizer.special(marker), Some(id));
        let ids = tokenizer.encode(marker).unwrap();
        assert!(ids.iter().all(|id| (3..128_000).contains(id)), "{marker} became {ids:?}");
    }
    for text in [" ".repeat(2_000_000), " \n".repeat(1_000_000), "!".repeat(2_000_000), " ".repeat(2_000_000) + "x"] {
        let ids = tokenizer.encode(&text).unwrap();
        assert!(tokenizer.decode(&ids, MarkerText::Hidden) == text);
    }
}
