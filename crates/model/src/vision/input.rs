//! The input of a tower: patches of pixels in the order of the program, and what depends on their places.

use std::{num::NonZero, ops::Range, thread};

use paguro_backend::Coordinates;
use paguro_vision::Part;

use super::{Tower, Vision, places::Places};

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
    /// Embedding of a further row that all patches see, without pixels (InternVL).
    pub(super) class: Option<Vec<f32>>,
    /// Value of each brightness, by channel.
    pub(super) values: Box<[[f32; 256]; 3]>,
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
    /// Returns the rows of a step that makes this number of rows of the text model. A row that is no patch is the first one of a further
    /// square.
    pub fn step_rows(&self, rows: usize) -> usize {
        let squares = rows.saturating_add(usize::from(self.arrangement.class.is_some()));
        squares.saturating_mul(self.patches_of_row())
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
        let patches = rows * columns * merge * merge;
        let (grid, given_width) = ([height / patch, width / patch], self.program.given_width());
        let hidden = self.program.hidden;
        let pixels = 3 * patch * patch;
        let mut given = vec![0.0; self.step_rows(rows * columns) * given_width];
        let patches_of = |squares: &[usize]| {
            let of_square = |&square: &usize| {
                let (top, left) = (square / columns * merge, square % columns * merge);
                (0..merge * merge).map(move |at| [top + at / merge, left + at % merge])
            };
            squares.iter().flat_map(of_square).collect::<Vec<_>>()
        };
        let fill = |(given, squares): (&mut [f32], &[usize])| {
            for (row, [y, x]) in given.chunks_exact_mut(given_width).zip(patches_of(squares)) {
                self.pixels(&rgb[(y * patch * width + x * patch) * 3..], width, &mut row[..pixels]);
                if given_width > pixels {
                    self.arrangement.places.write([y, x], grid, &mut row[pixels..][..hidden]);
                }
            }
        };
        let each = order.len().div_ceil(threads(given.len())).max(1);
        let of_threads = given.chunks_mut(each * merge * merge * given_width).zip(order.chunks(each));
        thread::scope(|scope| {
            let mut parts = of_threads;
            let own = parts.next();
            parts.for_each(|part| drop(scope.spawn(move || fill(part))));
            own.into_iter().for_each(fill);
        });
        let place = |[y, x]: [usize; 2]| [0, y as u32, x as u32];
        let mut coordinates: Vec<Coordinates> = patches_of(&order).into_iter().map(place).collect();
        if let Some(class) = &self.arrangement.class {
            given[patches * given_width + pixels..][..hidden].copy_from_slice(class);
            coordinates.resize(self.step_rows(rows * columns), [0; 3]);
        }
        if !self.program.has_axes() {
            coordinates.clear();
        }
        let square = merge * merge;
        let spans = match (self.program.has_spans(), &self.arrangement.class) {
            (false, _) => Vec::new(),
            // The rest of its square sees nothing but itself, and no row sees it.
            (true, Some(_)) => std::iter::once(0..patches + 1).collect(),
            (true, None) => {
                windows.into_iter().map(|window| window.start * square..window.end * square).collect()
            }
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
}

/// Returns the threads that arrange this many numbers: one for about a millisecond, but no more than half of the processors.
fn threads(numbers: usize) -> usize {
    const SHARE: usize = 1 << 19;
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    (numbers / SHARE).min(processors / 2).clamp(1, 8)
}

impl Vision {
    /// Returns the parts of a row: the embedding, and what is added after layers.
    pub fn parts(&self) -> usize {
        self.tower.program.merged().map_or(1, |merged| merged.taps.len())
    }
}
