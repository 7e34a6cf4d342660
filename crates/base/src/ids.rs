//! Identities. Each is a number that means nothing but "the same one".

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// One token timeline with its state (KV rows). A request with `n` samples has `n` sequences.
    SequenceId,
    "seq"
);
id!(
    /// What a client asked for.
    RequestId,
    "req"
);
id!(
    /// One forward pass, numbered in the order of submission.
    StepId,
    "step"
);
