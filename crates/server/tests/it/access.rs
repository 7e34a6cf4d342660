//! Keys, names, and pages of other origins.

use serde_json::json;
use troika_server::Access;

use crate::{CHAT, Reply, World, chat, client, says};

async fn closed() -> World {
    World::with(says("x"), |state| {
        state.access = Access::new(["sk-one", "sk-two"], ["http://app.example"]).expect("good keys");
    })
    .await
}

async fn ask(world: &World, headers: &[(&str, &str)]) -> Reply {
    let headers: Vec<_> = headers.iter().copied().chain([("content-type", "application/json")]).collect();
    client::send(world.address, "POST", CHAT, &headers, chat(json!({})).to_string().as_bytes()).await
}

#[tokio::test]
async fn any_of_the_keys_opens() {
    let world = closed().await;
    for header in [
        ("authorization", "Bearer sk-one"),
        ("Authorization", "bearer sk-two"),
        ("x-api-key", "sk-two"),
        ("X-Api-Key", " sk-one "),
    ] {
        ask(&world, &[header]).await.ok();
    }
    ask(&world, &[("authorization", "Bearer wrong"), ("x-api-key", "sk-one")]).await.ok();
    for headers in [
        &[][..],
        &[("authorization", "Bearer sk-on")],
        &[("authorization", "Bearer sk-one2")],
        &[("authorization", "Basic sk-one")],
        &[("authorization", "sk-one")],
        &[("x-api-key", "")],
        &[("x-api-key", "\u{ff}")],
    ] {
        let reply = ask(&world, headers).await;
        reply.refuses(401, "invalid_api_key", None);
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        assert!(!String::from_utf8_lossy(&reply.body).contains("sk-"), "no key comes back");
    }
    assert_eq!(world.engine.requests().len(), 5);
}

#[tokio::test]
async fn what_needs_no_key() {
    let world = closed().await;
    for path in ["/health", "/", "/troika/app.js", "/troika/app.css", "/openapi.json"] {
        assert_eq!(world.get(path).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/troika/status", "/v1/responses/resp_1", "/nothing"] {
        world.get(path).await.refuses(401, "invalid_api_key", None);
    }
    let reply = world.get("/v1/messages").await;
    assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (401, Some("authentication_error")));
}

#[tokio::test]
async fn pages_of_other_origins() {
    let world = closed().await;
    let preflight = |origin: &'static str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let address = world.address;
        async move { client::send(address, "OPTIONS", CHAT, &headers, b"").await }
    };
    let allowed = preflight("http://app.example").await;
    assert_eq!(allowed.status, 204);
    assert_eq!(allowed.header("access-control-allow-origin"), Some("http://app.example"));
    assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization,content-type"));
    let denied = preflight("http://evil.example").await;
    assert!(denied.status >= 400 && !denied.head.to_lowercase().contains("access-control"), "{}", denied.head);

    let key = ("authorization", "Bearer sk-one");
    let reply = ask(&world, &[key, ("origin", "http://app.example")]).await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some("http://app.example")));
    let reply = ask(&world, &[key, ("origin", "http://evil.example")]).await;
    assert!(!reply.head.to_lowercase().contains("access-control"), "{}", reply.head);
    // A page may read why it was turned away.
    let reply = ask(&world, &[("origin", "http://app.example")]).await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (401, Some("http://app.example")));
}

/// A web page whose name was made to lead here (DNS rebinding) cannot use a server without keys.
#[tokio::test]
async fn names_that_are_not_ours() {
    let world = World::saying("x").await;
    let head = |host: &str| format!("GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    let reply = client::raw(world.address, head("evil.example:8080").as_bytes()).await;
    reply.refuses(403, "unknown_host", None);
    for host in ["localhost:1", "127.0.0.1", "[::1]:9", "box"] {
        assert_eq!(client::raw(world.address, head(host).as_bytes()).await.status, 200, "{host}");
    }
}

#[tokio::test]
async fn bodies_share_their_memory() {
    use tokio::io::AsyncWriteExt;
    let world = World::with(says("x"), |state| state.limits.max_bodies_bytes = 10_000).await;
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 20000\r\n\r\n");
    let mut slow = tokio::net::TcpStream::connect(world.address).await.unwrap();
    slow.write_all(format!("{head}{}", " ".repeat(9_990)).as_bytes()).await.unwrap();
    let refused = loop {
        let reply = ask(&world, &[]).await;
        if reply.status != 200 {
            break reply;
        }
    };
    refused.refuses(429, "bodies_full", None);
    assert!(refused.header("retry-after").is_some());
    drop(slow);
    while ask(&world, &[]).await.status != 200 {}
}
