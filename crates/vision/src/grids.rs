//! Rules of tiles in the grid that fits best, and of pictures that are undivided if they are small.

use crate::{Grid, SizeError};

/// Maximum tiles of a grid.
const MAX_TILES: u32 = 1024;

/// Maximum tokens of a side whose pixels are computed.
const MAX_TOKENS: f64 = 65_536.0;

/// Limits of an undivided picture.
#[derive(Clone, Copy, Debug)]
pub struct FlexibleLimits {
    /// Minimum tokens.
    pub min: u32,
    /// Maximum tokens.
    pub max: u32,
    /// Ratio to the maximum from which on a picture is large.
    pub tolerance: f64,
}

/// Returns the grid whose ratio is the closest to that of the picture; of several, the one with most tiles that the picture fills by
/// half. `get_optimal_tiled_canvas` of GOT-OCR 2, which InternVL uses; `find_closest_aspect_ratio` of LFM2-VL.
pub fn closest(width: u32, height: u32, tile: u32, least: u32, most: u32) -> Result<Grid, SizeError> {
    if most == 0 || most > MAX_TILES || least > most {
        return Err(SizeError::Processor("the number of tiles must be 1 to 1024"));
    }
    let (ratio, area) = (f64::from(width) / f64::from(height), f64::from(width) * f64::from(height));
    let tile_area = f64::from(tile) * f64::from(tile);
    let (mut best, mut distance) = (Grid { rows: 1, columns: 1 }, f64::INFINITY);
    for tiles in least.max(1)..=most {
        for columns in (1..=tiles).filter(|columns| tiles.is_multiple_of(*columns)) {
            let grid = Grid { rows: tiles / columns, columns };
            let own = (ratio - f64::from(columns) / f64::from(grid.rows)).abs();
            if own < distance {
                (best, distance) = (grid, own);
            } else if own == distance && area > 0.5 * tile_area * f64::from(tiles) {
                best = grid;
            }
        }
    }
    Ok(best)
}

/// `smart_resize` of LFM2-VL. Returns width and height.
pub fn flexible(width: u32, height: u32, factor: u32, limits: FlexibleLimits) -> Result<[u32; 2], SizeError> {
    let (w, h, f) = (f64::from(width), f64::from(height), f64::from(factor));
    let [least, most] = [limits.min, limits.max].map(|tokens| f64::from(tokens) * f * f);
    let rounded = |side: f64| (side / f).round_ties_even().max(1.0);
    let [mut columns, mut rows] = [rounded(w), rounded(h)];
    if columns * f * rows * f > most {
        let beta = (h * w / most).sqrt();
        [columns, rows] = [w, h].map(|side| (side / beta / f).floor().max(1.0));
    } else if columns * f * (rows * f) < least {
        let beta = (least / (h * w)).sqrt();
        [columns, rows] = [w, h].map(|side| (side * beta / f).ceil());
    }
    match columns * rows <= f64::from(limits.max) && columns.max(rows) <= MAX_TOKENS {
        true => Ok([columns, rows].map(|count| (count * f) as u32)),
        false => Err(SizeError::TooNarrow { width, height }),
    }
}

/// Returns true if a picture is divided. `_is_image_too_large` of LFM2-VL.
pub fn is_large(width: u32, height: u32, factor: u32, patch: u32, limits: FlexibleLimits) -> bool {
    let (f, patch) = (f64::from(factor), f64::from(patch));
    let rounded = |side: u32| ((f64::from(side) / f).round_ties_even() * f).max(patch);
    rounded(width) * rounded(height) > f64::from(limits.max) * f * f * limits.tolerance
}

/// `navit_resize` of Kimi K2.5, without the borders. Returns width and height.
pub fn shrunk(
    width: u32,
    height: u32,
    patch: u32,
    max_patches: u32,
    max_side: u32,
) -> Result<[u32; 2], SizeError> {
    let most = f64::from(patch) * f64::from(max_side);
    if max_patches == 0 || most < 1.0 || most > f64::from(1 << 20) {
        return Err(SizeError::Processor("the maximum of patches permits no picture"));
    }
    let patches = |side: u32| f64::from((side / patch).max(1));
    let scale = (f64::from(max_patches) / (patches(height) * patches(width))).sqrt();
    let sides = [width, height].map(f64::from);
    let scale = 1.0_f64.min(scale).min(most / sides[1]).min(most / sides[0]);
    Ok(sides.map(|side| ((side * scale) as u32).max(1).min(most as u32)))
}
