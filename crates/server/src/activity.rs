//! The last requests and how long they took, for the status page. Says nothing of what was asked or answered.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;

/// Requests that are remembered.
const MAX_REMEMBERED: usize = 50;

/// One request that has ended.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) route: &'static str,
    pub(crate) started_unix_s: u64,
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    /// From submission to the first token, if one came.
    pub(crate) first_token_us: Option<u64>,
    /// From submission to the end.
    pub(crate) total_us: u64,
    /// `stop`, `length`, `tool_calls`, `failed`, `refused` by the engine, or `left`: the client did.
    pub(crate) ending: &'static str,
}

/// The last requests, oldest first.
#[derive(Default)]
pub(crate) struct Activity(Mutex<VecDeque<Entry>>);

impl Activity {
    pub(crate) fn add(&self, entry: Entry) {
        let mut entries = self.lock();
        if entries.len() == MAX_REMEMBERED {
            entries.pop_front();
        }
        entries.push_back(entry);
    }

    /// Newest first.
    pub(crate) fn snapshot(&self) -> Vec<Entry> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
