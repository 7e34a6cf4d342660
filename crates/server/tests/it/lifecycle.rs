//! Clients that leave, clients that do not read, and the server's own end.

use std::time::Duration;

use serde_json::json;
use tokio::{io::AsyncWriteExt, net::TcpStream, time::sleep};
use troika_engine::api::FinishReason;
use troika_testkit::scripted::{Act, End, Outcome};

use crate::{CHAT, COMPLETIONS, PATIENCE, World, chat, completion, outcomes, says};

const STEP: Duration = Duration::from_millis(100);
/// Steps within which a departure is noticed, however busy the machine is.
const SOON: usize = 50;

fn endless() -> Vec<Act> {
    vec![Act::Forever(b'x'.into(), STEP)]
}

fn is_cancelled(outcome: &Outcome) -> bool {
    matches!(outcome.end, End::Gone | End::Finished(FinishReason::Cancelled))
}

/// The engine takes few more steps for a client that has left: one, where threads get their turn at once.
#[tokio::test]
async fn a_vanished_reader_ends_its_stream() {
    let world = World::start(endless()).await;
    for round in 1..=5 {
        let mut stream = world.stream(CHAT, &chat(json!({"stream": true}))).await;
        for _ in 0..=round {
            stream.data().await.unwrap();
        }
        let before = world.engine.tokens_taken();
        drop(stream);
        let outcome = outcomes(&world.engine, round).await[round - 1];
        assert!(is_cancelled(&outcome), "{outcome:?}");
        assert!(world.engine.tokens_taken() <= before + SOON, "{outcome:?} after reading {round}");
    }
    world.engine.play(says("fine"));
    assert_eq!(world.post(CHAT, &chat(json!({}))).await.ok()["choices"][0]["message"]["content"], "fine");
}

#[tokio::test]
async fn a_vanished_client_ends_its_whole_answer() {
    let world = World::start(endless()).await;
    let body = completion(json!({})).to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut socket = TcpStream::connect(world.address).await.unwrap();
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    while world.engine.tokens_taken() == 0 {
        sleep(STEP / 10).await;
    }
    let before = world.engine.tokens_taken();
    drop(socket);
    let outcome = outcomes(&world.engine, 1).await[0];
    assert!(is_cancelled(&outcome), "{outcome:?}");
    assert!(world.engine.tokens_taken() <= before + SOON, "{outcome:?}");
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill() {
    let steps = (0..10_000).flat_map(|n| [Act::Prefilled(n), Act::Pause(Duration::from_millis(5))]);
    let world = World::start(steps.collect()).await;
    let stream = world.stream(CHAT, &chat(json!({"stream": true}))).await;
    drop(stream);
    let outcome = outcomes(&world.engine, 1).await[0];
    assert!(is_cancelled(&outcome), "{outcome:?}");
}

/// Tokens wait in a bounded place, the engine waits with the rest, and in the end gives up.
#[tokio::test]
async fn a_client_that_does_not_read() {
    let world = World::with(vec![Act::Forever(b'x'.into(), Duration::ZERO)], |state| {
        // Systems buffer megabytes for a reader, so the answer must be longer: each event carries the model's name.
        state.model_id = "m".repeat(20_000);
        state.limits.max_waiting_tokens = 4;
        state.limits.unread_timeout = Duration::from_millis(300);
    })
    .await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2048).unwrap();
    let mut socket = socket.connect(world.address).await.unwrap();
    let body = chat(json!({"stream": true})).to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    let outcome = outcomes(&world.engine, 1).await[0];
    assert_eq!(outcome.end, End::Gone, "{outcome:?}");
    assert!(outcome.times_full > 0, "{outcome:?}");
    drop(socket);
}

#[tokio::test]
async fn shutting_down_lets_answers_finish() {
    let mut script = says("a");
    script.push(Act::Pause(Duration::from_millis(150)));
    script.extend(says("b"));
    let world = World::with(script, |state| state.limits.grace = PATIENCE).await;
    let address = world.address;
    let mut stream = world.stream(CHAT, &chat(json!({"stream": true}))).await;
    stream.data().await.unwrap();
    let idle = TcpStream::connect(address).await.unwrap();
    let (collected, ()) = tokio::join!(stream.collect(), world.shut_down());
    assert_eq!((collected.text.as_str(), collected.is_done), ("ab", true));
    drop(idle);
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn shutting_down_ends_long_answers_with_an_event() {
    let world = World::start(endless()).await;
    let engine = world.engine.clone();
    let mut stream = world.stream(CHAT, &chat(json!({"stream": true}))).await;
    stream.data().await.unwrap();
    let (collected, ()) = tokio::join!(stream.collect(), world.shut_down());
    assert_eq!(collected.error.expect("an error")["code"], "shutting_down");
    assert!(!collected.is_done && collected.finish_reason.is_none());
    assert!(is_cancelled(&outcomes(&engine, 1).await[0]));
}

#[tokio::test]
async fn shutting_down_answers_who_waits_for_a_whole_answer() {
    let world = World::start(endless()).await;
    let address = world.address;
    let body = chat(json!({})).to_string();
    let waiting = tokio::spawn(async move {
        crate::client::send(address, "POST", CHAT, &[("content-type", "application/json")], body.as_bytes()).await
    });
    while world.engine.tokens_taken() == 0 {
        sleep(STEP / 10).await;
    }
    world.shut_down().await;
    waiting.await.unwrap().refuses(503, "shutting_down", None);
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() {
    let world = World::with(says("x"), |state| state.limits.header_timeout = Duration::from_millis(50)).await;
    use tokio::io::AsyncReadExt;
    for start in [&b""[..], b"POST /v1/chat"] {
        let mut socket = TcpStream::connect(world.address).await.unwrap();
        socket.write_all(start).await.unwrap();
        let mut rest = Vec::new();
        tokio::time::timeout(PATIENCE, socket.read_to_end(&mut rest)).await.expect("closed in time").unwrap();
    }
}

#[tokio::test]
async fn more_connections_than_places_wait_their_turn() {
    let world = World::with(says("x"), |state| state.limits.max_connections = 1).await;
    let first = TcpStream::connect(world.address).await.unwrap();
    let address = world.address;
    let second = tokio::spawn(async move { crate::client::send(address, "GET", "/health", &[], b"").await });
    sleep(Duration::from_millis(50)).await;
    assert!(!second.is_finished());
    drop(first);
    second.await.unwrap().ok();
}
