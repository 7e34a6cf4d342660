//! Request bodies: their type, their size, and the memory that all of them together may take.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderMap, StatusCode, header},
};
use futures_util::StreamExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{
    Limits,
    error::{ApiError, quote},
};

/// A body over the limit is read on up to this many times the limit, so that its sender comes to read our answer.
const PATIENCE: usize = 4;

/// Seconds after which there is likely to be room for a body.
const RETRY_AFTER_S: u64 = 2;

/// Bytes that request bodies may take together, while they arrive and until they are understood.
#[derive(Clone)]
pub(crate) struct BodyBudget(Arc<Semaphore>);

/// A body, with its share of the budget.
pub(crate) struct Received {
    pub(crate) bytes: Bytes,
    pub(crate) share: BodyShare,
}

/// Bytes of the budget, given back when dropped.
#[derive(Default)]
pub(crate) struct BodyShare(Option<OwnedSemaphorePermit>);

impl BodyBudget {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self(Arc::new(Semaphore::new(limits.max_bodies_bytes.min(Semaphore::MAX_PERMITS))))
    }

    /// Reads the body of a request that must be JSON.
    pub(crate) async fn read_json(&self, request: Request, limits: &Limits) -> Result<Received, ApiError> {
        check_content_type(request.headers())?;
        let body = timeout(limits.body_timeout, self.read(request.into_body(), limits.max_body_bytes));
        body.await.map_err(|_| {
            ApiError::request(StatusCode::REQUEST_TIMEOUT, "timeout", "The request body did not arrive in time.")
        })?
    }

    async fn read(&self, body: Body, max_bytes: usize) -> Result<Received, ApiError> {
        let mut stream = body.into_data_stream();
        let (mut bytes, mut num_bytes) = (Vec::new(), 0);
        let mut share = BodyShare::default();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| {
                let message = format!("The request body broke off: {error}");
                ApiError::request(StatusCode::BAD_REQUEST, "incomplete_body", message)
            })?;
            num_bytes += chunk.len();
            if num_bytes <= max_bytes {
                let more = self.take(chunk.len())?;
                match &mut share.0 {
                    Some(share) => share.merge(more),
                    none => *none = Some(more),
                }
                bytes.extend_from_slice(&chunk);
            } else if num_bytes > max_bytes.saturating_mul(PATIENCE) {
                break;
            } else {
                // Refused already, so what it holds is of no use.
                (bytes, share) = (Vec::new(), BodyShare::default());
            }
        }
        if num_bytes > max_bytes {
            let message = format!("The request body is longer than {max_bytes} bytes.");
            return Err(ApiError::request(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
        }
        Ok(Received { bytes: bytes.into(), share })
    }

    /// Waiting for room would let half-read bodies wait for each other.
    fn take(&self, num_bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let num_bytes = u32::try_from(num_bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.0).try_acquire_many_owned(num_bytes).map_err(|_| {
            let message = "The server is reading as many bytes of requests as it can hold.";
            ApiError::busy("bodies_full", message, RETRY_AFTER_S)
        })
    }
}

/// Anything but JSON is refused, also because a web page can send other types here without asking first.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("The request's content-type must be application/json, not `{}`.", quote(essence));
    Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}
