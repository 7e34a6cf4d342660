//! Whole equals pieces.

use proptest::prelude::*;
use troika_prompt::{Checked, Detokenizer, MarkerText, StopMatcher};
use troika_testkit::tokenizer::TokenizerSpec;

use crate::load;

#[test]
fn characters_come_whole() {
    let tokenizer = load(&TokenizerSpec::plain());
    let mut detokenizer = Detokenizer::new(tokenizer, MarkerText::Hidden);
    let mut push = |byte: u8| detokenizer.push(u32::from(byte));
    assert_eq!([push(0xF0), push(0x9F), push(0x98), push(0x80)], ["", "", "", "😀"]);
    // Two bytes of a character, then one that cannot follow: one replacement, and nothing lost after it.
    assert_eq!([push(0xE4), push(0xBD), push(b'a')], ["", "", "\u{FFFD}a"]);
    assert_eq!([push(0xFF), push(0xE4)], ["\u{FFFD}", ""]);
    assert_eq!(detokenizer.finish(), "\u{FFFD}");
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn stop_strings_across_pieces() {
    let matcher = |stops: &[&str]| StopMatcher::new(&stops.iter().map(|stop| (*stop).to_owned()).collect::<Vec<_>>());
    let text = |text: &str| Checked { text: text.into(), stop: None };

    let mut one = matcher(&["END"]);
    assert_eq!(
        [one.push("aE"), one.push("N"), one.push("E"), one.push("ND tail")],
        [text("a"), text(""), text("EN"), Checked { text: String::new(), stop: Some(0) }]
    );
    assert_eq!(one.push("more"), Checked { text: String::new(), stop: Some(0) });
    assert_eq!(one.finish(), "");

    // Complete first wins, though the other began earlier.
    assert_eq!(matcher(&["abcd", "bc"]).push("xabcd"), Checked { text: "xa".into(), stop: Some(1) });
    // Complete at the same letter: the longer.
    assert_eq!(matcher(&["bc", "abc"]).push("xabc"), Checked { text: "x".into(), stop: Some(1) });
    // Overlapping starts.
    assert_eq!(matcher(&["aab"]).push("aaab"), Checked { text: "a".into(), stop: Some(0) });
    // Letters that share bytes are not cut.
    let mut accents = matcher(&["éa"]);
    assert_eq!([accents.push("é"), accents.push("è")], [text(""), text("éè")]);
    // Held text comes out in the end.
    let mut unfinished = matcher(&["END", ""]);
    assert_eq!((unfinished.push("xEN"), unfinished.finish()), (text("x"), "EN".to_owned()));
}

/// What a matcher that sees the whole text at once would let through.
fn naive_stop(text: &str, stops: &[String]) -> (String, Option<usize>) {
    for end in 0..=text.len() {
        let found = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty() && text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some((index, stop)) = found.max_by_key(|(_, stop)| stop.len()) {
            return (text[..end - stop.len()].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn pieces_equal_the_whole(ids in proptest::collection::vec(0u32..280, 0..60), shown: bool) {
        let tokenizer = load(&TokenizerSpec::plain());
        let markers = if shown { MarkerText::Shown } else { MarkerText::Hidden };
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), markers);
        let mut text = String::new();
        for id in &ids {
            let piece = detokenizer.push(*id);
            // A replacement that could still have become a character would break the equality below.
            text.push_str(&piece);
            prop_assert!(tokenizer.decode(&ids, markers).starts_with(&text));
        }
        text.push_str(&detokenizer.finish());
        prop_assert_eq!(text, tokenizer.decode(&ids, markers));
    }

    #[test]
    fn real_text_never_shows_a_replacement(text in "\\PC{0,30}") {
        let tokenizer = load(&TokenizerSpec::plain());
        let mut detokenizer = Detokenizer::new(tokenizer, MarkerText::Hidden);
        let pieces: Vec<String> = text.bytes().map(|byte| detokenizer.push(u32::from(byte))).collect();
        prop_assert_eq!(pieces.concat(), text);
        prop_assert_eq!(detokenizer.finish(), "");
    }

    /// Every way to cut a short text in two, and a random way to cut it in many.
    #[test]
    fn stops_do_not_depend_on_cuts(
        text in "[abé]{0,14}",
        stops in proptest::collection::vec("[abé]{0,4}", 0..4),
        cuts: u64,
    ) {
        let want = naive_stop(&text, &stops);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let ways = (0..=letters.len()).map(|cut| 1u64.checked_shl(cut as u32).unwrap_or(0)).chain([cuts, 0, u64::MAX]);
        for way in ways {
            let mut matcher = StopMatcher::new(&stops);
            let (mut out, mut stop, mut piece) = (String::new(), None, String::new());
            for (idx, letter) in letters.iter().enumerate() {
                if way >> (idx % 64) & 1 == 1 {
                    let checked = matcher.push(&std::mem::take(&mut piece));
                    out.push_str(&checked.text);
                    stop = stop.or(checked.stop);
                    // What is not let through is at most one letter short of a stop string.
                    let longest = stops.iter().map(String::len).max().unwrap_or(0);
                    let taken: usize = letters[..idx].iter().map(String::len).sum();
                    prop_assert!(stop.is_some() || taken - out.len() <= longest.saturating_sub(1));
                }
                piece.push_str(letter);
            }
            let checked = matcher.push(&piece);
            out.push_str(&checked.text);
            stop = stop.or(checked.stop);
            out.push_str(&matcher.finish());
            prop_assert_eq!((out, stop), want.clone(), "cut {:b}", way);
        }
    }
}
