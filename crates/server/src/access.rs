//! Who may ask: API keys, the names this server answers to, and the web pages that may read its answers.
//!
//! Keys are kept as digests only, so that nothing here can print one.

use std::{convert::Infallible, fmt::Write, net::IpAddr, sync::Arc};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};

use crate::error::{ApiError, quote};

/// Paths that need no key: they say nothing about anybody's requests.
const OPEN_PATHS: [&str; 5] = ["/health", "/", "/troika/app.js", "/troika/app.css", "/openapi.json"];
/// Seconds for which a browser may remember what other origins are allowed.
const PREFLIGHT_AGE_S: u32 = 600;

/// Who may use the server. The default is everybody who can reach it, and no web page but our own.
#[derive(Clone, Default)]
pub struct Access {
    keys: Vec<KeyDigest>,
    origins: Vec<HeaderValue>,
    is_shared: bool,
}

/// On whose behalf a request is computed. Prefixes of one tenant serve no other, and each sees its own requests only.
/// Empty if there are no tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tenant(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

type KeyDigest = [u8; 32];

impl Access {
    /// Only requests that carry one of these keys are served, if there are any keys.
    ///
    /// # Errors
    ///
    /// If a key cannot stand in a header or an origin is none. The message does not repeat a key.
    pub fn new<'a>(
        keys: impl IntoIterator<Item = &'a str>,
        cors_origins: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, AccessError> {
        let digest = |key: &str| {
            let is_usable = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
            if is_usable { Ok(digest(key.as_bytes())) } else { Err(AccessError::Key) }
        };
        let origin = |origin: &str| {
            let is_origin = origin.split_once("://").is_some_and(|(_, host)| !host.is_empty() && !host.contains('/'));
            let value = HeaderValue::from_str(origin).ok().filter(|_| is_origin);
            value.ok_or_else(|| AccessError::Origin { origin: origin.to_owned() })
        };
        let mut keys: Vec<KeyDigest> = keys.into_iter().map(digest).collect::<Result<_, _>>()?;
        // A key that is given twice is still one.
        keys.sort_unstable();
        keys.dedup();
        let origins = cors_origins.into_iter().map(origin).collect::<Result<_, _>>()?;
        Ok(Self { keys, origins, is_shared: false })
    }

    /// Lets the holders of different keys use each other's kept prefixes, and see each other's requests.
    #[must_use]
    pub fn shared_between_keys(self) -> Self {
        Self { is_shared: true, ..self }
    }

    /// Whether each key is a tenant of its own.
    #[must_use]
    pub fn isolates_keys(&self) -> bool {
        self.keys.len() > 1 && !self.is_shared
    }

    /// Whether requests need a key.
    #[must_use]
    pub fn needs_key(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Who asks; `None` if they may not.
    fn tenant(&self, headers: &HeaderMap) -> Option<Tenant> {
        if self.keys.is_empty() {
            return Some(Tenant::default());
        }
        let key = given_keys(headers).find_map(|given| self.find(given))?;
        let name = || {
            key.iter().fold(String::new(), |mut name, byte| {
                let _ = write!(name, "{byte:02x}");
                name
            })
        };
        Some(if self.isolates_keys() { Tenant(name()) } else { Tenant::default() })
    }

    /// Takes as long for a wrong key as for a right one: all digests are compared, whole.
    fn find(&self, key: &[u8]) -> Option<&KeyDigest> {
        let given = digest(key);
        let differs = |known: &KeyDigest| known.iter().zip(&given).fold(0, |bits, (a, b)| bits | (a ^ b));
        let found = self.keys.iter().map(|known| (std::hint::black_box(differs(known)) == 0).then_some(known));
        found.fold(None, Option::or)
    }

    /// Without keys, a web page whose name was made to lead to this machine could use the server from a browser. Such a
    /// name has dots; ours has none, or is an address.
    fn allows_host(&self, headers: &HeaderMap) -> bool {
        let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return true };
        let without_port = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let name = without_port.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
        self.needs_key() || name.parse::<IpAddr>().is_ok() || !name.contains('.') || name.ends_with(".localhost")
    }

    fn allowed_origin(&self, headers: &HeaderMap) -> Option<&HeaderValue> {
        let asking = headers.get(header::ORIGIN)?;
        self.origins.iter().find(|origin| *origin == asking)
    }
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("num_keys", &self.keys.len()).field("origins", &self.origins).finish()
    }
}

/// Why an [`Access`] cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// A key that no client could send.
    #[error("an API key must be one or more printable ASCII letters without spaces")]
    Key,
    /// Not an origin.
    #[error("`{origin}` is not an origin such as http://localhost:3000")]
    Origin { origin: String },
}

fn digest(key: &[u8]) -> KeyDigest {
    Sha256::digest(key).into()
}

/// Keys as OpenAI's clients send them, and as Anthropic's do.
fn given_keys(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearers = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    });
    bearers.chain(headers.get_all("x-api-key").iter().map(|value| value.as_bytes().trim_ascii()))
}

/// Lets a request pass, or answers it.
pub(crate) async fn guard(State(access): State<Arc<Access>>, mut request: Request, next: Next) -> Response {
    if !access.allows_host(request.headers()) {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let message = format!(
            "This server has no API keys and does not answer to the name `{}`: a web page could use it that way. Use an \
             address or `localhost`, or start the server with --api-key.",
            quote(host)
        );
        return ApiError::request(StatusCode::FORBIDDEN, "unknown_host", message).into_response();
    }
    let origin = access.allowed_origin(request.headers()).cloned();
    let mut response = if let Some(preflight) = preflight(&request, origin.is_some()) {
        preflight
    } else if let Some(tenant) = access.tenant(request.headers()) {
        request.extensions_mut().insert(tenant);
        next.run(request).await
    } else if OPEN_PATHS.contains(&request.uri().path()) {
        next.run(request).await
    } else {
        unauthorized()
    };
    if let Some(origin) = origin {
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().insert(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// The answer to a browser that asks, for an allowed page, what it may send.
fn preflight(request: &Request, is_allowed: bool) -> Option<Response> {
    let asked = request.headers();
    if !is_allowed || request.method() != Method::OPTIONS || !asked.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
    {
        return None;
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_AGE_S.into());
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    Some(response)
}

fn unauthorized() -> Response {
    let message = "This server needs an API key, in the header `Authorization: Bearer KEY` or `x-api-key: KEY`.";
    let mut response = ApiError::unauthorized(message).into_response();
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_never_shown() {
        let access = Access::new(["sk-secret-1", "sk-secret-2"], ["http://localhost:3000"]).unwrap();
        assert!(!format!("{access:?}").contains("secret"));
        let knows = |key: &[u8]| access.find(key).is_some();
        assert!(knows(b"sk-secret-2") && !knows(b"sk-secret-3") && !knows(b""));
        for key in ["", "a b", "ключ", "a\n"] {
            let error = Access::new([key], []).unwrap_err();
            assert_eq!(error, AccessError::Key);
        }
        for origin in ["", "localhost", "*", "http://", "http://a/b"] {
            assert!(Access::new([], [origin]).is_err(), "{origin}");
        }
    }

    #[test]
    fn several_keys_are_tenants_of_their_own() {
        let tenant = |access: &Access, key: &'static str| {
            access.tenant(&HeaderMap::from_iter([(
                header::HeaderName::from_static("x-api-key"),
                HeaderValue::from_static(key),
            )]))
        };
        let access = Access::new(["one", "two"], []).unwrap();
        let (one, two) = (tenant(&access, "one").unwrap(), tenant(&access, "two").unwrap());
        assert!(access.isolates_keys() && one != two && one.0.len() == 64 && one != Tenant::default());
        assert_eq!(tenant(&access, "three"), None);
        // The name of a tenant does not depend on who else there is.
        assert_eq!(tenant(&Access::new(["two", "three", "one"], []).unwrap(), "one"), Some(one));
        for access in [access.shared_between_keys(), Access::new(["one", "one"], []).unwrap()] {
            assert_eq!((access.isolates_keys(), tenant(&access, "one")), (false, Some(Tenant::default())));
        }
    }

    #[test]
    fn names_that_could_be_anybodys() {
        let host = |host: &str| HeaderMap::from_iter([(header::HOST, HeaderValue::from_str(host).unwrap())]);
        let (open, closed) = (Access::default(), Access::new(["k"], []).unwrap());
        for name in ["localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "::1", "box", "a.localhost:1"] {
            assert!(open.allows_host(&host(name)), "{name}");
        }
        for name in ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example."] {
            assert!(!open.allows_host(&host(name)) && closed.allows_host(&host(name)), "{name}");
        }
    }
}
