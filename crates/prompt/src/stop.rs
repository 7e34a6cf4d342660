//! Stop strings in a text that comes in pieces.

/// Lets text through up to the first stop string, and holds back what could still become one.
///
/// The first stop string is the one that is complete first; of those complete at the same letter, the longest. So the
/// decision never depends on how the text was cut, nor on text that has not come yet.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text taken and not yet let through.
    held: String,
    matched: Option<usize>,
}

/// What became of a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Text that is certainly before any stop string.
    pub text: String,
    /// Which stop string was found, by its place in the list. Nothing comes after it.
    pub stop: Option<usize>,
}

/// One stop string and how much of it the text ends with: a Knuth-Morris-Pratt automaton over bytes.
#[derive(Debug)]
struct Stop {
    index: usize,
    bytes: Vec<u8>,
    /// `fallback[n]`: length of the longest proper prefix of `bytes` that `bytes[..=n]` ends with.
    fallback: Vec<usize>,
    num_matched: usize,
}

impl StopMatcher {
    /// Looks for any of `stops`. An empty one would match everywhere and is left out.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        let nonempty = stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let stops = nonempty.map(|(index, stop)| Stop::new(index, stop.as_bytes())).collect();
        Self { stops, held: String::new(), matched: None }
    }

    /// Takes the next piece. After a match it takes nothing more.
    pub fn push(&mut self, piece: &str) -> Checked {
        if self.matched.is_some() {
            return Checked { text: String::new(), stop: self.matched };
        }
        let start = self.held.len();
        self.held.push_str(piece);
        for (offset, byte) in piece.bytes().enumerate() {
            self.stops.iter_mut().for_each(|stop| stop.advance(byte));
            let complete = self.stops.iter().filter(|stop| stop.num_matched == stop.bytes.len());
            if let Some(stop) = complete.max_by_key(|stop| stop.bytes.len()) {
                self.matched = Some(stop.index);
                let mut text = std::mem::take(&mut self.held);
                text.truncate(start + offset + 1 - stop.bytes.len());
                return Checked { text, stop: self.matched };
            }
        }
        // A prefix of a stop string starts at a letter, so this never cuts one in half.
        let held_len = self.stops.iter().map(|stop| stop.num_matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - held_len);
        Checked { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// Text still held back, now that no more comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(index: usize, bytes: &[u8]) -> Self {
        let mut fallback = vec![0; bytes.len()];
        let mut len = 0;
        for n in 1..bytes.len() {
            while len > 0 && bytes[n] != bytes[len] {
                len = fallback[len - 1];
            }
            if bytes[n] == bytes[len] {
                len += 1;
            }
            fallback[n] = len;
        }
        Self { index, bytes: bytes.to_vec(), fallback, num_matched: 0 }
    }

    /// Never called on a complete match: the matcher is done then.
    fn advance(&mut self, byte: u8) {
        while self.num_matched > 0 && self.bytes[self.num_matched] != byte {
            self.num_matched = self.fallback[self.num_matched - 1];
        }
        if self.bytes[self.num_matched] == byte {
            self.num_matched += 1;
        }
    }
}
