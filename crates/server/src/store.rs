//! Responses that clients may ask for again or go on from. In memory only, and the oldest go first.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;

use crate::access::Tenant;

/// A response as text: far smaller than parsed, and its size is known.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    /// The document as the client got it.
    pub(crate) document: Arc<str>,
    /// Input and output items: what a next request goes on from.
    pub(crate) items: ItemText,
}

/// A list of items as JSON text, without its brackets.
#[derive(Clone, Debug, Default)]
pub(crate) struct ItemText(Arc<str>);

impl ItemText {
    pub(crate) fn followed_by(&self, items: &[Value]) -> Self {
        if items.is_empty() {
            return self.clone();
        }
        let mut text = self.0.to_string();
        for item in items {
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(&item.to_string());
        }
        Self(text.into())
    }

    pub(crate) fn parse(&self) -> serde_json::Result<Vec<Value>> {
        serde_json::from_str(&format!("[{}]", self.0))
    }
}

impl Stored {
    fn num_bytes(&self) -> usize {
        self.document.len() + self.items.0.len()
    }
}

/// The last responses, within a number and a size that all tenants share; each finds its own only.
#[derive(Clone, Debug)]
pub(crate) struct ResponseStore {
    max_responses: usize,
    max_bytes: usize,
    inner: Arc<Mutex<Inner>>,
    tenant: Tenant,
}

#[derive(Debug, Default)]
struct Inner {
    responses: BTreeMap<String, Stored>,
    oldest_first: VecDeque<String>,
    num_bytes: usize,
}

impl ResponseStore {
    pub(crate) fn new(max_responses: usize, max_bytes: usize) -> Self {
        Self { max_responses, max_bytes, inner: Arc::default(), tenant: Tenant::default() }
    }

    /// The same store as this tenant sees it.
    pub(crate) fn of(&self, tenant: Tenant) -> Self {
        Self { tenant, ..self.clone() }
    }

    fn key(&self, id: &str) -> String {
        format!("{}/{id}", self.tenant.0)
    }

    /// Keeps a response; one that is too large on its own is not kept.
    pub(crate) fn put(&self, id: &str, document: &Value, items: &ItemText) {
        let stored = Stored { document: document.to_string().into(), items: items.clone() };
        let num_bytes = stored.num_bytes();
        if num_bytes > self.max_bytes || self.max_responses == 0 {
            tracing::debug!(bytes = num_bytes, "a response is too large to be kept");
            return;
        }
        let mut inner = self.lock();
        while inner.oldest_first.len() >= self.max_responses || inner.num_bytes + num_bytes > self.max_bytes {
            let Some(oldest) = inner.oldest_first.front().cloned() else { break };
            inner.remove(&oldest);
        }
        inner.num_bytes += num_bytes;
        inner.oldest_first.push_back(self.key(id));
        inner.responses.insert(self.key(id), stored);
    }

    pub(crate) fn get(&self, id: &str) -> Option<Stored> {
        self.lock().responses.get(&self.key(id)).cloned()
    }

    /// Forgets a response; false if there was none.
    pub(crate) fn remove(&self, id: &str) -> bool {
        self.lock().remove(&self.key(id))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn remove(&mut self, id: &str) -> bool {
        let Some(stored) = self.responses.remove(id) else { return false };
        self.num_bytes -= stored.num_bytes();
        self.oldest_first.retain(|other| other != id);
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_oldest_go_first() {
        let store = ResponseStore::new(3, 1000);
        for n in 0..5 {
            store.put(&format!("r{n}"), &json!({"n": n}), &ItemText::default().followed_by(&[json!(n)]));
        }
        assert!(store.get("r1").is_none() && store.get("r2").is_some() && store.get("r4").is_some());
        assert_eq!(store.get("r3").unwrap().items.followed_by(&[json!("x")]).parse().unwrap(), [json!(3), json!("x")]);
        store.put("large", &json!("x".repeat(995)), &ItemText::default());
        assert!(store.get("r4").is_none() && store.get("large").is_some(), "room is made");
        store.put("too large", &json!("x".repeat(2000)), &ItemText::default());
        assert!(store.get("too large").is_none() && store.get("large").is_some());
        let other = store.of(Tenant("other".to_owned()));
        assert!(other.get("large").is_none() && !other.remove("large"), "each tenant finds its own only");
        assert!(store.remove("large") && !store.remove("large"));
        assert_eq!(store.lock().num_bytes, 0);
    }
}
