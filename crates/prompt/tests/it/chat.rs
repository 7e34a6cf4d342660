use proptest::prelude::*;
use troika_prompt::{
    ChatOptions, MarkerText, Message, OldReasoning, PromptError, ThinkingMode, encode_chat, encode_completion,
};
use troika_testkit::tokenizer::{MARKERS, TokenizerSpec};

use crate::{library_ids, load};

const CHAT: ChatOptions = ChatOptions { mode: ThinkingMode::Chat, old_reasoning: OldReasoning::Drop };
const THINKING: ChatOptions = ChatOptions { mode: ThinkingMode::Thinking, old_reasoning: OldReasoning::Drop };
const KEEPING: ChatOptions = ChatOptions { mode: ThinkingMode::Thinking, old_reasoning: OldReasoning::Keep };

fn system(content: &str) -> Message {
    Message::System { content: content.into() }
}

fn user(content: &str) -> Message {
    Message::User { blocks: vec![content.into()] }
}

fn assistant(reasoning: &str, content: &str) -> Message {
    let reasoning = (!reasoning.is_empty()).then(|| reasoning.to_owned());
    Message::Assistant { reasoning, content: content.into() }
}

fn check(messages: &[Message], options: ChatOptions, rendered: &str) {
    let spec = TokenizerSpec { split: true, ..TokenizerSpec::plain() };
    let tokenizer = load(&spec);
    let ids = encode_chat(&tokenizer, messages, options).unwrap();
    let readable = |text: &str| {
        text.replace("<｜begin▁of▁sentence｜>", "<B>")
            .replace("<｜end▁of▁sentence｜>", "<E>")
            .replace("<｜User｜>", "<U>")
            .replace("<｜Assistant｜>", "<A>")
    };
    assert_eq!(readable(&tokenizer.decode(&ids, MarkerText::Shown)), rendered);
    // And the same ids as the whole rendered text would give, since nobody forges anything here.
    assert_eq!(ids, library_ids(&spec, &tokenizer.decode(&ids, MarkerText::Shown)));
}

#[test]
fn one_turn() {
    check(&[user("hello")], CHAT, "<B><U>hello<A></think>");
    check(&[user("hello")], THINKING, "<B><U>hello<A><think>");
    check(&[system("Be brief."), user("hello")], CHAT, "<B>Be brief.<U>hello<A></think>");
    check(&[], CHAT, "<B>");
}

#[test]
fn several_turns() {
    let messages = [user("1"), assistant("why", "2"), user("3"), assistant("because", "4"), user("5")];
    check(&messages, CHAT, "<B><U>1<A></think>2<E><U>3<A></think>4<E><U>5<A></think>");
    check(&messages, THINKING, "<B><U>1<A></think>2<E><U>3<A></think>4<E><U>5<A><think>");
    check(&messages, KEEPING, "<B><U>1<A><think>why</think>2<E><U>3<A><think>because</think>4<E><U>5<A><think>");
}

#[test]
fn a_conversation_that_ends_with_the_model() {
    let messages = [user("1"), assistant("why", "2"), user("3"), assistant("because", "4")];
    check(&messages, CHAT, "<B><U>1<A></think>2<E><U>3<A></think>4<E>");
    check(&messages, THINKING, "<B><U>1<A></think>2<E><U>3<A><think>because</think>4<E>");
    check(&[user("1"), assistant("", "2")], THINKING, "<B><U>1<A><think></think>2<E>");
}

#[test]
fn user_messages_in_a_row_are_one() {
    let blocks = Message::User { blocks: vec!["b".into(), "c".into()] };
    check(&[user("a"), blocks, user("d")], CHAT, "<B><U>a\n\nb\n\nc\n\nd<A></think>");
    check(&[user("a"), system("s"), user("b")], CHAT, "<B><U>as<U>b<A></think>");
}

#[test]
fn completions_begin_with_bos() {
    let tokenizer = load(&TokenizerSpec::plain());
    assert_eq!(encode_completion(&tokenizer, "hello").unwrap(), [256, 266]);
    assert_eq!(encode_completion(&tokenizer, "").unwrap(), [256]);
}

#[test]
fn a_missing_marker_is_named() {
    for missing in ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"] {
        let markers = MARKERS.into_iter().filter(|marker| *marker != missing).collect();
        let tokenizer = load(&TokenizerSpec { markers, ..TokenizerSpec::plain() });
        let error = encode_chat(&tokenizer, &[user("hello")], CHAT).unwrap_err();
        assert!(matches!(&error, PromptError::MissingSpecial { name } if name == missing), "{error}");
        assert!(error.to_string().contains(missing));
    }
    // What is not needed is not asked for.
    let tokenizer = load(&TokenizerSpec { markers: MARKERS[..1].to_vec(), ..TokenizerSpec::plain() });
    assert!(encode_completion(&tokenizer, "hello").is_ok());
}

proptest! {
    /// Hostile content keeps its bytes and leaves the markers where the roles put them.
    #[test]
    fn content_cannot_forge_turns(pieces in proptest::collection::vec(0usize..10, 1..6), special: bool) {
        let spec = TokenizerSpec { markers_are_special: special, split: true, ..TokenizerSpec::plain() };
        let tokenizer = load(&spec);
        let piece = |idx: usize| MARKERS.get(idx).copied().unwrap_or(["\n", "x", " "][idx % 3]);
        let content: String = pieces.into_iter().map(piece).collect();
        let messages = [system(&content), user(&content), assistant(&content, &content), user(&content)];
        for options in [CHAT, THINKING, KEEPING] {
            let harmless = [system("s"), user("u"), assistant("r", "a"), user("u")];
            let markers_of = |messages: &[Message]| -> Vec<u32> {
                let ids = encode_chat(&tokenizer, messages, options).unwrap();
                ids.into_iter().filter(|id| (256..263).contains(id)).collect()
            };
            prop_assert_eq!(markers_of(&messages), markers_of(&harmless));
        }
    }
}
