//! Paths, and the way from a request to its answer.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{Path, Request, State},
    http::{Method, StatusCode, Uri, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, watch},
    task::spawn_blocking,
    time::Instant,
};

use troika_prompt::ConstraintCompiler;

use crate::{
    ServerState,
    access::{Tenant, guard},
    activity::{self, Activity},
    answer::{self, Anthropic, Format, Keep, OpenAi, Responses},
    body::{BodyBudget, BodyShare, Received},
    connections::Phase,
    encoding::encode,
    error::{ApiError, quote},
    generation::{Generation, Job},
    metrics::{self, Metrics},
    openapi, page,
    parameters::Endpoint,
    random_name,
    request::{Asked, Delivery, model_not_found, response_not_found},
    store::ResponseStore,
    unix_time_s,
};

/// Requests whose JSON and text are worked on at a time: each may need a hundred times its size while that lasts.
const MAX_READERS: usize = 2;

/// What the handlers share.
pub(crate) struct App {
    pub(crate) state: ServerState,
    pub(crate) activity: Arc<Activity>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) started: Instant,
    phase: watch::Receiver<Phase>,
    store: ResponseStore,
    constraints: ConstraintCompiler,
    bodies: BodyBudget,
    readers: Arc<Semaphore>,
}

pub(crate) fn router(state: ServerState, phase: watch::Receiver<Phase>) -> Router {
    let access = Arc::new(state.access.clone());
    let limits = state.limits;
    let constraints = ConstraintCompiler::new(Arc::clone(&state.tokenizer), state.stop_tokens.clone());
    let app = Arc::new(App {
        state,
        constraints,
        activity: Arc::default(),
        metrics: Arc::default(),
        started: Instant::now(),
        phase,
        store: ResponseStore::new(limits.max_stored_responses, limits.max_stored_bytes),
        bodies: BodyBudget::new(&limits),
        readers: Arc::new(Semaphore::new(MAX_READERS)),
    });
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/responses", post(responses))
        .route("/v1/responses/{id}", get(stored_response).delete(delete_response))
        .route("/openapi.json", get(openapi::serve))
        .route("/metrics", get(metrics::serve))
        .route("/troika/status", get(page::status))
        .route("/troika/requests/{id}", get(activity::request))
        .merge(page::files())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(app)
        .layer(from_fn_with_state(access, guard))
        .layer(from_fn(speak_anthropic))
}

/// Puts errors of Anthropic's routes in Anthropic's shape, wherever they come from.
async fn speak_anthropic(request: Request, next: Next) -> Response {
    let is_anthropic = request.uri().path().starts_with(Endpoint::Messages.path());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>().filter(|_| is_anthropic) {
        let (mut parts, _) = response.into_parts();
        parts.headers.remove(header::CONTENT_LENGTH);
        response = Response::from_parts(parts, error.anthropic_body().to_string().into());
    }
    response
}

async fn not_found(method: Method, uri: Uri) -> ApiError {
    let message = format!("There is no {method} {}.", quote(uri.path()));
    ApiError::request(StatusCode::NOT_FOUND, "not_found", message)
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not answer {method}.", quote(uri.path()));
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

impl App {
    /// Whether the server works, and if not, why.
    pub(crate) fn health(&self) -> (StatusCode, &'static str, Option<String>) {
        let engine = self.state.generator.status();
        match (engine.failure, &self.state.degraded) {
            (Some(failure), _) => (StatusCode::SERVICE_UNAVAILABLE, "failed", Some(failure)),
            (None, _) if *self.phase.borrow() != Phase::Serving => (StatusCode::SERVICE_UNAVAILABLE, "stopping", None),
            (None, Some(degraded)) => (StatusCode::OK, "degraded", Some(degraded.clone())),
            (None, None) if engine.cache.disk_failed => {
                let reason = "prefixes are not kept on disk: it refuses to write or to read; the log says why";
                (StatusCode::OK, "degraded", Some(reason.to_owned()))
            }
            (None, None) => match engine.hybrid.map(|hybrid| hybrid.state) {
                Some(state) if state.starts_with("quarantined") => (StatusCode::OK, "degraded", Some(state)),
                _ => (StatusCode::OK, "ok", None),
            },
        }
    }
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let engine = app.state.generator.status();
    let (code, status, reason) = app.health();
    let body = json!({
        "status": status,
        "reason": reason,
        "model": app.state.model_id,
        "queued": engine.queued,
        "running": engine.running,
        "hybrid": engine.hybrid.map(|hybrid| hybrid.state),
    });
    (code, Json(body)).into_response()
}

fn describe_model(state: &ServerState) -> Value {
    json!({"id": state.model_id, "object": "model", "created": state.created_unix_s, "owned_by": "troika"})
}

async fn models(State(app): State<Arc<App>>) -> Response {
    Json(json!({"object": "list", "data": [describe_model(&app.state)]})).into_response()
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    if id != app.state.model_id {
        return Err(model_not_found(&id, &app.state.model_id));
    }
    Ok(Json(describe_model(&app.state)).into_response())
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(&app, Endpoint::Completions, request).await
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(&app, Endpoint::Chat, request).await
}

async fn messages(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(&app, Endpoint::Messages, request).await
}

async fn responses(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(&app, Endpoint::Responses, request).await
}

async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let received = app.bodies.read_json(request, &app.state.limits).await?;
    let counting = read(&app, received, |app, body| {
        let asked = Asked::parse(Endpoint::Messages, body, &app.state, &app.store)?;
        Ok(encode(&app.state, &app.constraints, &asked)?.request.prompt.len())
    });
    let (num_tokens, _) = counting.await?;
    Ok(Json(json!({"input_tokens": num_tokens})).into_response())
}

async fn stored_response(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let stored = app.store.of(tenant).get(&id).ok_or_else(|| response_not_found(&id))?;
    let document = Bytes::copy_from_slice(stored.document.as_bytes());
    Ok(([(header::CONTENT_TYPE, "application/json")], document).into_response())
}

async fn delete_response(
    State(app): State<Arc<App>>,
    tenant: Tenant,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if !app.store.of(tenant).remove(&id) {
        return Err(response_not_found(&id));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response())
}

async fn generate(app: &Arc<App>, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    let limits = app.state.limits;
    let tenant = request.extensions().get::<Tenant>().cloned().unwrap_or_default();
    let store = app.store.of(tenant.clone());
    let received = app.bodies.read_json(request, &limits).await?;
    let of_request = store.clone();
    let ((asked, encoded), share) = read(app, received, move |app, body| {
        let asked = Asked::parse(endpoint, body, &app.state, &of_request)?;
        if endpoint == Endpoint::Messages && asked.max_tokens.is_none() {
            return Err(ApiError::invalid("max_tokens", "`max_tokens` must be given."));
        }
        let encoded = encode(&app.state, &app.constraints, &asked)?;
        Ok((asked, encoded))
    })
    .await?;
    let prefix = match endpoint {
        Endpoint::Chat => "chatcmpl-",
        Endpoint::Completions => "cmpl-",
        Endpoint::Messages => "msg_",
        Endpoint::Responses => "resp_",
    };
    let id = format!("{prefix}{}", random_name());
    let delivery = asked.delivery;
    let job = Job {
        request: encoded.request,
        num_choices: asked.num_choices,
        stops: asked.stops.clone(),
        reading: encoded.reading,
        parallel_calls: asked.parallel_calls(),
        echo: encoded.echo,
        id: id.clone(),
        route: endpoint.path(),
        tenant,
    };
    let generation = Generation::start(app, app.phase.clone(), job)?;
    let format = format(app, endpoint, id, asked, store, share);
    match delivery {
        Delivery::Whole => answer::whole(generation, format).await,
        Delivery::Stream { .. } => Ok(answer::streamed(generation, format, limits.keep_alive)),
    }
}

/// How this API puts its answer.
fn format(
    app: &App,
    endpoint: Endpoint,
    id: String,
    asked: Asked,
    store: ResponseStore,
    share: BodyShare,
) -> Box<dyn Format> {
    let (model_id, created_unix_s) = (app.state.model_id.clone(), unix_time_s());
    match (endpoint, asked.response) {
        (Endpoint::Messages, _) => Box::new(Anthropic::new(id, model_id, asked.stops)),
        (Endpoint::Responses, Some(response)) => {
            // Parts of the body live until the answer does, and count for as long.
            let keep = response.store.then_some(Keep { store, items: response.items });
            Box::new(Responses::new(id, model_id, created_unix_s, response.echo, keep, share))
        }
        _ => {
            let include_usage = matches!(asked.delivery, Delivery::Stream { include_usage: true });
            Box::new(OpenAi::new(id, endpoint == Endpoint::Chat, created_unix_s, model_id, include_usage))
        }
    }
}

/// Parses and encodes away from the threads that serve sockets. Gives back the body's share of the memory too.
async fn read<T: Send + 'static>(
    app: &Arc<App>,
    received: Received,
    work: impl FnOnce(&App, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, BodyShare), ApiError> {
    let Ok(reader) = Arc::clone(&app.readers).acquire_owned().await else {
        return Err(ApiError::shutting_down());
    };
    let work = {
        let app = Arc::clone(app);
        spawn_blocking(move || {
            // Both are held until the work is done, even if the client is gone by then.
            let (_reader, received) = (reader, received);
            Ok((work(&app, &received.bytes)?, received.share))
        })
    };
    work.await.unwrap_or_else(|error| {
        let message = format!("The request could not be read: {error}");
        Err(ApiError::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message))
    })
}
