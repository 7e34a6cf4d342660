//! Products with the mixing matrix in plain Rust.

pub(super) fn dots(x: &[&[f32]; super::ROWS], rows: usize, w: &[&[f32]; super::OUTPUTS], out: &mut super::Sums) {
    for (x, out) in x[..rows].iter().zip(out) {
        for (w, out) in w.iter().zip(out) {
            *out = dot(x, w);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut l = [0.0f32; 8];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for (l, (a, b)) in l.iter_mut().zip(a.iter().zip(b)) {
            *l += a * b;
        }
    }
    let sum = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
    a_tail.iter().zip(b_tail).fold(sum, |sum, (a, b)| sum + a * b)
}
