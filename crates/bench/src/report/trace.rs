//! Phases of requests as a trace for Chrome (`chrome://tracing`) and Perfetto: a process for each experiment, a thread for
//! each arm.

use serde_json::{Value, json};

use super::plot::phases;
use super::title;
use crate::record::Record;

/// The trace as JSON.
pub fn render(record: &Record) -> Value {
    let mut events = Vec::new();
    for (pid, experiment) in record.experiments.iter().enumerate() {
        events
            .push(json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title(experiment, record)}}));
        for (tid, arm) in experiment.arms.iter().enumerate() {
            let name = format!("{}: {}", arm.arm.name.letter(), arm.arm.label);
            events.push(json!({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}));
            for (name, start, end) in phases(experiment, arm.arm.name).into_iter().flatten() {
                let (ts, dur) = (start * 1e3, (end - start) * 1e3);
                events.push(json!({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur}));
            }
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}
