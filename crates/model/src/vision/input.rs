//! The input of a tower: patches of pixels in the order of the program, and what depends on their places.

use std::ops::Range;

use paguro_backend::Coordinates;
use paguro_vision::Part;

use super::{Tower, Vision};

/// Order of patches, and what is added to them.
#[derive(Debug)]
pub(super) struct Arrangement {
    /// Pixels per side of a patch.
    pub(super) patch: usize,
    /// Patches per side of a square that becomes one row.
    pub(super) merge: usize,
    /// Squares per side of a window, whose patches only see each other in some layers.
    pub(super) window: Option<usize>,
    /// Learned embeddings of places.
    pub(super) places: Places,
    /// Value of each brightness, by channel.
    pub(super) values: Box<[[f32; 256]; 3]>,
}

/// Learned embeddings of places, `[places, hidden]`.
#[derive(Debug)]
pub(super) enum Places {
    /// None.
    None,
    /// A square grid, resized to the picture's with its corners in place (Qwen3-VL).
    Resized { table: Vec<f32>, side: usize },
    /// A square grid of which a patch has the place with the nearest lower fraction of the side (SigLIP, Idefics3).
    Fraction { table: Vec<f32>, side: usize },
    /// The sum of an embedding of the column and one of the row (Gemma 4): `[2, count, hidden]`.
    Axes { table: Vec<f32>, count: usize },
}

/// A part of a picture as one sequence of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerInput {
    /// Given rows, `[patches, given_width]`.
    pub given: Vec<f32>,
    /// Coordinates of patches; empty if the program has no axes.
    pub coordinates: Vec<Coordinates>,
    /// Windows, as rows of this sequence.
    pub spans: Vec<Range<usize>>,
    /// The rows of the text model in the order in which the program computes them: place `i` has the number of its `i`th row.
    pub order: Vec<usize>,
}

impl Arrangement {
    /// Returns the values of brightnesses from 0 to 255.
    pub(super) fn values(mean: [f32; 3], std: [f32; 3]) -> Box<[[f32; 256]; 3]> {
        let mut values = Box::new([[0.0; 256]; 3]);
        for (channel, values) in values.iter_mut().enumerate() {
            let (mean, std) = (f64::from(mean[channel]), f64::from(std[channel]));
            for (brightness, value) in values.iter_mut().enumerate() {
                *value = ((brightness as f64 / 255.0 - mean) / std) as f32;
            }
        }
        values
    }
}

impl Tower {
    /// Returns the number of patches of a part.
    pub fn patches(&self, part: &Part) -> usize {
        let patch = self.arrangement.patch;
        (part.width as usize / patch) * (part.height as usize / patch)
    }

    /// Returns the number of patches of a row of the text model.
    pub fn patches_of_row(&self) -> usize {
        self.arrangement.merge.pow(2)
    }

    /// Returns the number of numbers of one row: all of its parts.
    pub fn row_width(&self) -> usize {
        self.program.residual_width()
    }

    /// Arranges the pixels of a part, `[height, width, 3]`.
    ///
    /// # Errors
    /// The part does not consist of whole rows, or has other pixels.
    pub fn input(&self, part: &Part, rgb: &[u8]) -> Result<TowerInput, String> {
        let Arrangement { patch, merge, .. } = self.arrangement;
        let (width, height) = (part.width as usize, part.height as usize);
        let side = patch * merge;
        if width == 0 || height == 0 || !width.is_multiple_of(side) || !height.is_multiple_of(side) {
            return Err(format!("{width}×{height} pixels are no whole rows of {side}×{side}"));
        }
        if rgb.len() != width * height * 3 {
            return Err(format!("{} bytes for {width}×{height} pixels", rgb.len()));
        }
        let (rows, columns) = (height / side, width / side);
        let (order, windows) = self.order(rows, columns);
        let (grid, given_width) = ([height / patch, width / patch], self.program.given_width());
        let hidden = self.program.hidden;
        let pixels = 3 * patch * patch;
        let mut given = vec![0.0; rows * columns * merge * merge * given_width];
        let mut coordinates = Vec::new();
        let squares = order.iter().flat_map(|&square| {
            let (top, left) = (square / columns * merge, square % columns * merge);
            (0..merge * merge).map(move |at| (top + at / merge, left + at % merge))
        });
        for (row, (y, x)) in given.chunks_exact_mut(given_width).zip(squares) {
            self.pixels(&rgb[(y * patch * width + x * patch) * 3..], width, &mut row[..pixels]);
            if given_width > pixels {
                self.place([y, x], grid, &mut row[pixels..][..hidden]);
            }
            coordinates.push([0, y as u32, x as u32]);
        }
        if !self.program.has_axes() {
            coordinates.clear();
        }
        let spans = match self.program.has_spans() {
            false => Vec::new(),
            true => windows
                .into_iter()
                .map(|window| window.start * merge * merge..window.end * merge * merge)
                .collect(),
        };
        Ok(TowerInput { given, coordinates, spans, order })
    }

    /// Returns the squares in the order of the program, and windows of them: places in this order.
    fn order(&self, rows: usize, columns: usize) -> (Vec<usize>, Vec<Range<usize>>) {
        let Some(side) = self.arrangement.window else {
            return ((0..rows * columns).collect(), Vec::new());
        };
        let (mut order, mut windows) = (Vec::with_capacity(rows * columns), Vec::new());
        for top in (0..rows).step_by(side) {
            for left in (0..columns).step_by(side) {
                let first = order.len();
                for row in top..rows.min(top + side) {
                    order.extend((left..columns.min(left + side)).map(|column| row * columns + column));
                }
                windows.push(first..order.len());
            }
        }
        (order, windows)
    }

    /// Writes the pixels of a patch by channel, row and column. `rgb` begins with its first pixel.
    fn pixels(&self, rgb: &[u8], width: usize, out: &mut [f32]) {
        let Arrangement { patch, ref values, .. } = self.arrangement;
        for (channel, (plane, values)) in out.chunks_exact_mut(patch * patch).zip(values.iter()).enumerate() {
            for (y, line) in plane.chunks_exact_mut(patch).enumerate() {
                let first = y * width * 3 + channel;
                for (x, value) in line.iter_mut().enumerate() {
                    *value = values[usize::from(rgb[first + 3 * x])];
                }
            }
        }
    }

    /// Writes the embedding of the place of a patch in a grid of patches.
    fn place(&self, [y, x]: [usize; 2], [rows, columns]: [usize; 2], out: &mut [f32]) {
        let hidden = out.len();
        let row = |table: &[f32], place: usize| place * hidden..(place + 1) * hidden.min(table.len());
        match &self.arrangement.places {
            Places::None => {}
            Places::Fraction { table, side } => {
                let nearest = |at: usize, count: usize| (at * side / count).min(side - 1);
                let place = nearest(y, rows) * side + nearest(x, columns);
                out.copy_from_slice(&table[row(table, place)]);
            }
            Places::Axes { table, count } => {
                let (column, own) = (x.min(count - 1), count + y.min(count - 1));
                out.copy_from_slice(&table[row(table, column)]);
                out.iter_mut().zip(&table[row(table, own)]).for_each(|(out, value)| *out += value);
            }
            Places::Resized { table, side } => {
                let between = |at: usize, count: usize| {
                    let place = match count {
                        1 => 0.0,
                        _ => at as f32 * (side - 1) as f32 / (count - 1) as f32,
                    };
                    let low = (place as usize).min(side - 1);
                    (low, (low + 1).min(side - 1), place - low as f32)
                };
                let (top, bottom, down) = between(y, rows);
                let (left, right, along) = between(x, columns);
                let corners = [
                    (top, left, (1.0 - down) * (1.0 - along)),
                    (top, right, (1.0 - down) * along),
                    (bottom, left, down * (1.0 - along)),
                    (bottom, right, down * along),
                ];
                out.fill(0.0);
                for (y, x, weight) in corners {
                    let from = &table[row(table, y * side + x)];
                    out.iter_mut().zip(from).for_each(|(out, value)| *out += weight * value);
                }
            }
        }
    }
}

impl Vision {
    /// Returns the parts of a row: the embedding, and what is added after layers.
    pub fn parts(&self) -> usize {
        self.tower.program.merged().map_or(1, |merged| merged.taps.len())
    }
}
