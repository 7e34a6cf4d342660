//! Comparisons that say where and by how much.

use std::fmt::Debug;

/// The largest difference between two slices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worst {
    pub index: usize,
    pub got: f32,
    pub want: f32,
    /// Infinite where one side is NaN or infinite and the other is not the same.
    pub difference: f64,
}

/// The place where `got` and `want` differ most, or `None` if they are equal everywhere. NaN equals NaN here, and each
/// infinity itself, since golden files use them on purpose.
///
/// # Panics
///
/// If the lengths differ.
pub fn worst_difference(got: &[f32], want: &[f32]) -> Option<Worst> {
    assert_eq!(got.len(), want.len(), "lengths differ");
    let mut worst: Option<Worst> = None;
    for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
        if got == want || (got.is_nan() && want.is_nan()) {
            continue;
        }
        let difference = (f64::from(got) - f64::from(want)).abs();
        let difference = if difference.is_nan() { f64::INFINITY } else { difference };
        if worst.is_none_or(|worst| difference > worst.difference) {
            worst = Some(Worst { index, got, want, difference });
        }
    }
    worst
}

/// Checks that no element is further than `max_abs` from its golden value. Returns the largest difference, so that a test
/// can report how much room is left.
///
/// # Panics
///
/// If the lengths differ or an element is too far off; the message has `name`, the worst place, and both values there.
#[track_caller]
pub fn assert_close(name: &str, got: &[f32], want: &[f32], max_abs: f64) -> f64 {
    assert_eq!(got.len(), want.len(), "{name}: got {} values, want {}", got.len(), want.len());
    let Some(worst) = worst_difference(got, want) else { return 0.0 };
    let far = got
        .iter()
        .zip(want)
        .filter(|&(&got, &want)| worst_difference(&[got], &[want]).is_some_and(|w| w.difference > max_abs));
    assert!(
        worst.difference <= max_abs,
        "{name}: {} of {} values are further off than {max_abs:e}; worst at {}: got {:?}, want {:?}, difference {:e}",
        far.count(),
        got.len(),
        worst.index,
        worst.got,
        worst.want,
        worst.difference,
    );
    worst.difference
}

/// Checks that two slices are equal: ids, tokens, bits.
///
/// # Panics
///
/// If they are not; the message has `name`, the first place, and both values there.
#[track_caller]
pub fn assert_equal<T: PartialEq + Debug>(name: &str, got: &[T], want: &[T]) {
    let first = got.iter().zip(want).position(|(got, want)| got != want);
    if let Some(index) = first {
        panic!("{name}: first difference at {index} of {}: got {:?}, want {:?}", want.len(), got[index], want[index]);
    }
    assert_eq!(
        got.len(),
        want.len(),
        "{name}: equal as far as both go, but got {} values, want {}",
        got.len(),
        want.len()
    );
}

/// Checks that two slices of floats have the same bits: what the row contract promises.
///
/// # Panics
///
/// As [`assert_equal`].
#[track_caller]
pub fn assert_same_bits(name: &str, got: &[f32], want: &[f32]) {
    let first = got.iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits());
    if let Some(index) = first {
        let (got, want) = (got[index], want[index]);
        panic!(
            "{name}: bits differ first at {index}: {got:?} ({:#010x}) and {want:?} ({:#010x})",
            got.to_bits(),
            want.to_bits()
        );
    }
    assert_eq!(got.len(), want.len(), "{name}: lengths differ");
}

/// Index of the largest value; the lowest of equals.
///
/// # Panics
///
/// If `values` is empty.
pub fn argmax(values: &[f32]) -> usize {
    assert!(!values.is_empty(), "argmax of nothing");
    (1..values.len()).fold(0, |best, index| if values[index] > values[best] { index } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_is_close() {
        assert_eq!(
            assert_close("x", &[1.0, f32::NAN, f32::NEG_INFINITY], &[1.0, f32::NAN, f32::NEG_INFINITY], 0.0),
            0.0
        );
        let room = assert_close("x", &[1.0, 2.5], &[1.0, 2.0], 0.6);
        assert!((room - 0.5).abs() < 1e-9);
    }

    #[test]
    #[should_panic(
        expected = "x: 1 of 3 values are further off than 1e-1; worst at 1: got 2.5, want 2.0, difference 5e-1"
    )]
    fn the_worst_place_is_named() {
        assert_close("x", &[1.0, 2.5, 3.01], &[1.0, 2.0, 3.0], 0.1);
    }

    #[test]
    #[should_panic(expected = "difference inf")]
    fn a_nan_is_never_close() {
        assert_close("x", &[f32::NAN], &[1.0], 1e9);
    }

    #[test]
    #[should_panic(expected = "got 1 values, want 2")]
    fn lengths_must_agree() {
        assert_close("x", &[1.0], &[1.0, 2.0], 1.0);
    }

    #[test]
    #[should_panic(expected = "ids: first difference at 1 of 2: got 5, want 6")]
    fn the_first_wrong_id_is_named() {
        assert_equal("ids", &[1, 5], &[1, 6]);
    }

    #[test]
    #[should_panic(expected = "bits differ first at 0")]
    fn negative_zero_has_other_bits() {
        assert_same_bits("x", &[0.0], &[-0.0]);
    }

    #[test]
    fn the_lowest_of_equals_wins() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
