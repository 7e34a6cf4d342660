//! Names of blocks. Equal names mean equal rows: a name covers everything the rows depend on.

use std::fmt;

use sha2::{Digest, Sha256};

/// What every block of a sequence depends on besides its tokens (hybrid spec 10.6).
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// Of the weights.
    pub weights: &'a [u8],
    /// Of the tokenizer.
    pub tokenizer: &'a [u8],
    /// Version of the layout of rows and boundaries.
    pub layout: u32,
    /// Numeric class, and what else its bits depend on.
    pub arithmetic: &'a str,
    /// Keeps tenants apart; empty if they share.
    pub tenant: &'a [u8],
}

impl Identity<'_> {
    /// Name of the empty prefix.
    pub fn root(&self) -> BlockHash {
        let mut hasher = Sha256::new();
        hasher.update(b"troika kv");
        hasher.update(self.layout.to_le_bytes());
        // Lengths, so that no two identities read the same.
        for part in [self.weights, self.tokenizer, self.arithmetic.as_bytes(), self.tenant] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        BlockHash(hasher.finalize().into())
    }
}

/// Name of a block: of all tokens up to its end, and of what else its rows depend on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// Name of the block of `tokens` that follows this one.
    pub fn child(&self, tokens: &[u32]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        Self(hasher.finalize().into())
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Names of the whole blocks of `tokens`, each of `block` tokens.
///
/// # Panics
///
/// If `block` is zero.
pub fn chain(root: BlockHash, tokens: &[u32], block: usize) -> Vec<BlockHash> {
    let mut parent = root;
    let name = |tokens: &[u32]| {
        parent = parent.child(tokens);
        parent
    };
    tokens.chunks_exact(block).map(name).collect()
}
