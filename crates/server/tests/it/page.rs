//! The web page and what it asks for. How it behaves in a browser is tested in `clients/`.

use serde_json::json;

use crate::{CHAT, World, chat, outcomes, says};

#[tokio::test]
async fn the_page_asks_nobody_else() {
    let world = World::saying("x").await;
    let mut texts = String::new();
    for (path, kind) in [("/", "text/html"), ("/troika/app.js", "text/javascript"), ("/troika/app.css", "text/css")] {
        let reply = world.get(path).await;
        assert_eq!(reply.status, 200);
        assert!(reply.header("content-type").unwrap().starts_with(kind), "{path}");
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        texts += &String::from_utf8(reply.body).unwrap();
    }
    for outside in ["http://", "https://", "src=\"//", "style=\"", "onclick=", "<script>", "innerHTML", "eval("] {
        assert!(!texts.contains(outside), "{outside}");
    }
    for needed in ["<html lang=", "name=\"viewport\"", "aria-live", "<label"] {
        assert!(texts.contains(needed), "{needed}");
    }
}

#[tokio::test]
async fn the_status_knows_the_last_requests() {
    let world = World::with(says("four"), |state| state.devices = vec!["an abacus".into()]).await;
    let status = world.get("/troika/status").await.ok();
    assert_eq!((&status["status"], &status["model"]), (&json!("ok"), &json!("troika/nano")));
    assert_eq!((&status["devices"], &status["requests"]), (&json!(["an abacus"]), &json!([])));
    world.post(CHAT, &chat(json!({}))).await.ok();
    world.post(CHAT, &chat(json!({"max_tokens": 2, "stream": true}))).await;
    outcomes(&world.engine, 2).await;
    let status = world.get("/troika/status").await.ok();
    let requests = status["requests"].as_array().unwrap();
    assert_eq!(requests.len(), 2);
    assert_eq!((&requests[0]["ending"], &requests[1]["ending"]), (&json!("length"), &json!("stop")));
    assert_eq!((&requests[0]["completion_tokens"], &requests[1]["completion_tokens"]), (&json!(2), &json!(4)));
    assert!(requests.iter().all(|request| request["route"] == CHAT && request["first_token_us"].is_u64()));
    assert!(!status.to_string().contains("hello"), "no word of a prompt");
    for _ in 0..60 {
        world.post(CHAT, &chat(json!({}))).await.ok();
    }
    assert_eq!(world.get("/troika/status").await.ok()["requests"].as_array().unwrap().len(), 50);
}
