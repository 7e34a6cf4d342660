//! A trace for Chrome (`chrome://tracing`) and Perfetto. For each experiment a process with the phases of a request, a thread
//! for each arm; and for each arm a process with one prefill step, a thread for each device.

use serde_json::{Value, json};

use super::plot::{device_name, phases};
use super::title;
use crate::record::Record;

/// The trace as JSON.
pub fn render(record: &Record) -> Value {
    let mut events = Vec::new();
    let mut pid = 0;
    for experiment in &record.experiments {
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
        pid += 1;
        for arm in &experiment.arms {
            let Some(step) = &arm.step else { continue };
            let (model, letter) = (&experiment.model.name, arm.arm.name.letter());
            let name = format!("{model}, arm {letter}: {} tokens from position {}", step.tokens, step.position);
            events.push(json!({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}));
            let devices: std::collections::BTreeSet<u16> = step.spans.iter().map(|span| span.device).collect();
            for device in devices {
                let args = json!({"name": device_name(Some(device))});
                events.push(json!({"ph": "M", "pid": pid, "tid": device, "name": "thread_name", "args": args}));
            }
            for span in &step.spans {
                let (tid, name, ts, dur) = (span.device, &span.kind, span.start_us, span.end_us - span.start_us);
                let args = json!({"layer": span.layer});
                events
                    .push(json!({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}));
            }
            pid += 1;
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}
