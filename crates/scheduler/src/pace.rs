//! How a running stream and a long prompt share the machine.
//!
//! While a prefill step is in flight, a decode step waits until the gap between tokens would reach `max_itl`. Nodes of a
//! decode step go before the next node of a prefill step, so a gap is the wait, the nodes already begun, and the decode step
//! itself. What comes after the wait is learned from how late tokens were lately, and is never taken for less than the
//! longest node and a decode step. A chunk whose longest node alone would break the bound is narrowed.

/// A running mean that forgets, in eighths.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    us: u64,
}

impl Mean {
    fn add(&mut self, us: u64) {
        self.us = if self.us == 0 { us } else { (self.us * 7 + us) / 8 };
    }
}

/// The largest of late, forgotten slowly: a sixty-fourth with each new number.
#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    us: u64,
}

impl Peak {
    fn add(&mut self, us: u64) {
        self.us = us.max(self.us - self.us / 64);
    }
}

/// What has been seen of the machine's speed, and what follows from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    max_itl_us: u64,
    decode: Mean,
    /// Longest node of a prefill step, per 1024 rows, and its fixed part.
    node_us_per_1024: Mean,
    /// Time of a prefill step per 1024 rows.
    prefill_us_per_1024: Mean,
    last_decode_done_us: Option<u64>,
    /// When the decode step in flight was due, if it had to wait for that.
    due_us: Option<u64>,
    /// From when a decode step beside a prefill step was due until its tokens were there.
    late: Peak,
}

impl Pace {
    pub(crate) fn new(max_itl_us: u64) -> Self {
        let mean = Mean::default();
        Self {
            max_itl_us,
            decode: mean,
            node_us_per_1024: mean,
            prefill_us_per_1024: mean,
            last_decode_done_us: None,
            due_us: None,
            late: Peak::default(),
        }
    }

    pub(crate) fn decoded(&mut self, now_us: u64, elapsed_us: u64, beside_prefill: bool) {
        // Beside a prefill step it also waited for nodes already begun; the bound counts those apart.
        if !beside_prefill || self.decode.us == 0 {
            self.decode.add(elapsed_us.max(1));
        }
        if let Some(due_us) = self.due_us.take() {
            self.late.add(now_us.saturating_sub(due_us));
        }
        self.last_decode_done_us = Some(now_us);
    }

    /// A decode step starts beside a prefill step of so many rows.
    pub(crate) fn decoding(&mut self, rows_of_prefill: usize) {
        self.due_us = self.decode_due_us(rows_of_prefill);
    }

    pub(crate) fn prefilled(&mut self, rows: usize, elapsed_us: u64, longest_node_us: u64) {
        let per_1024 = |us: u64| us.saturating_mul(1024) / rows.max(1) as u64;
        self.node_us_per_1024.add(per_1024(longest_node_us).max(1));
        self.prefill_us_per_1024.add(per_1024(elapsed_us).max(1));
    }

    pub(crate) fn idle(&mut self) {
        self.last_decode_done_us = None;
    }

    /// When the next decode step should start if a prefill step is in flight.
    pub(crate) fn decode_due_us(&self, step_rows: usize) -> Option<u64> {
        let last = self.last_decode_done_us?;
        let after = self.late.us.max(self.decode.us + self.node_us(step_rows));
        // Prefill never gets less than a third of the time, however tight the bound.
        let slice = self.max_itl_us.saturating_sub(after).max(self.decode.us / 2);
        Some(last + slice)
    }

    /// How often a step must be halved for its longest node to leave room for a decode step.
    pub(crate) fn halvings(&self, step: usize) -> u32 {
        let room = self.max_itl_us.saturating_sub(self.decode.us).max(self.max_itl_us / 4);
        let mut times = 0;
        while times < 6 && self.node_us(step >> times) > room && step >> (times + 1) >= 16 {
            times += 1;
        }
        times
    }

    fn node_us(&self, rows: usize) -> u64 {
        self.node_us_per_1024.us.saturating_mul(rows as u64) / 1024
    }

    /// How long `tokens` prompt tokens will take; 0 while nothing is known.
    pub(crate) fn prefill_us(&self, tokens: u64) -> u64 {
        self.prefill_us_per_1024.us.saturating_mul(tokens) / 1024
    }
}
