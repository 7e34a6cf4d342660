//! `troika bench compare`: two records side by side.
