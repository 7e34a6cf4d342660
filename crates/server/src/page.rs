//! The web page: status, a chat, the last requests. Its files are in the binary and it asks nobody but this server.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderName, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;

use crate::{access::Tenant, routes::App};

/// Everything the page needs comes from here, and nothing inline runs.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) fn files() -> Router<Arc<App>> {
    let file = |content_type: &'static str, text: &'static str| get(async move || serve(content_type, text));
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("page/index.html")))
        .route("/troika/app.js", file("text/javascript; charset=utf-8", include_str!("page/app.js")))
        .route("/troika/app.css", file("text/css; charset=utf-8", include_str!("page/app.css")))
}

fn serve(content_type: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    (headers, text).into_response()
}

/// What the page shows beside the chat.
pub(crate) async fn status(State(app): State<Arc<App>>, tenant: Tenant) -> Response {
    let (engine, (_, status, reason)) = (app.state.generator.status(), app.health());
    let body = json!({
        "status": status,
        "reason": reason,
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.state.model_id,
        "devices": app.state.devices,
        "geometry": engine.geometry,
        "hybrid": engine.hybrid,
        "max_context_tokens": app.state.max_context_tokens,
        "uptime_s": app.started.elapsed().as_secs(),
        "queued": engine.queued,
        "running": engine.running,
        "prompt_tokens_total": engine.prompt_tokens_total,
        "completion_tokens_total": engine.completion_tokens_total,
        "requests_total": engine.requests_total,
        "requests": app.activity.snapshot(&tenant),
    });
    ([(header::CACHE_CONTROL, "no-store")], Json(body)).into_response()
}
