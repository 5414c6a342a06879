//! Learned embeddings of the places of patches.

/// Learned embeddings of places, `[places, hidden]`.
#[derive(Debug)]
pub(super) enum Places {
    /// None.
    None,
    /// A square grid, resized to that of a picture.
    Grid { table: Vec<f32>, side: usize, resize: Resize },
    /// The sum of an embedding of the column and one of the row (Gemma 4): `[2, count, hidden]`.
    Axes { table: Vec<f32>, count: usize },
}

/// Rule by which a grid is resized, along each axis.
#[derive(Clone, Copy, Debug)]
pub(super) enum Resize {
    /// The place with the nearest lower fraction of the side (SigLIP, Idefics3).
    Fraction,
    /// Linear, with the corners in place (Qwen3-VL).
    Corners,
    /// Linear between centers of places (PaddleOCR-VL).
    Centers,
    /// Linear between centers of places, over wider windows where the grid shrinks (SigLIP 2).
    Antialiased,
    /// Cubic between centers of places (GLM-4V, Kimi-VL).
    Cubic,
}

impl Places {
    /// Writes the embedding of the place of a patch in a grid of patches.
    pub(super) fn write(&self, [y, x]: [usize; 2], [rows, columns]: [usize; 2], out: &mut [f32]) {
        let hidden = out.len();
        let row = |table: &[f32], place: usize| place * hidden..(place + 1) * hidden.min(table.len());
        match self {
            Self::None => {}
            Self::Axes { table, count } => {
                let (column, own) = (x.min(count - 1), count + y.min(count - 1));
                out.copy_from_slice(&table[row(table, column)]);
                out.iter_mut().zip(&table[row(table, own)]).for_each(|(out, value)| *out += value);
            }
            Self::Grid { table, side, resize } => {
                let (down, along) = (resize.taps(y, rows, *side), resize.taps(x, columns, *side));
                out.fill(0.0);
                for &(y, weight) in &down {
                    for &(x, factor) in &along {
                        let (weight, from) = (weight * factor, &table[row(table, y * side + x)]);
                        out.iter_mut().zip(from).for_each(|(out, value)| *out += weight * value);
                    }
                }
            }
        }
    }
}

impl Resize {
    /// Returns the places, of `side`, that place `at` of `count` is made of, with their weights.
    fn taps(self, at: usize, count: usize, side: usize) -> Vec<(usize, f32)> {
        let last = side - 1;
        match self {
            Self::Fraction => vec![((at * side / count).min(last), 1.0)],
            Self::Corners => {
                let place = match count {
                    1 => 0.0,
                    _ => at as f32 * last as f32 / (count - 1) as f32,
                };
                let low = (place as usize).min(last);
                let part = place - low as f32;
                vec![(low, 1.0 - part), ((low + 1).min(last), part)]
            }
            Self::Antialiased => {
                let scale = side as f32 / count as f32;
                let support = scale.max(1.0);
                let center = scale * (at as f32 + 0.5);
                let first = (center - support + 0.5).max(0.0) as usize;
                let end = ((center + support + 0.5) as usize).min(side);
                let weight = |place: usize| (1.0 - ((place as f32 - center + 0.5) / support).abs()).max(0.0);
                let sum: f32 = (first..end).map(weight).sum();
                (first..end).map(|place| (place, weight(place) / sum)).collect()
            }
            Self::Centers => {
                let center = ((at as f32 + 0.5) * side as f32 / count as f32 - 0.5).clamp(0.0, last as f32);
                let low = center as usize;
                let part = center - low as f32;
                vec![(low, 1.0 - part), ((low + 1).min(last), part)]
            }
            Self::Cubic => {
                let center = (at as f32 + 0.5) * side as f32 / count as f32 - 0.5;
                let low = center.floor();
                let part = center - low;
                let place = |offset: i32| (low as i32 + offset).clamp(0, last as i32) as usize;
                (-1..=2).map(|offset| (place(offset), cubic(part - offset as f32))).collect()
            }
        }
    }
}

/// Keys' cubic kernel with `a = -0.75`, as PyTorch has it.
fn cubic(distance: f32) -> f32 {
    const A: f32 = -0.75;
    let x = distance.abs();
    if x <= 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}
