//! Sizes and tokens of a picture's parts, computed from its size alone.
//!
//! Each rule equals that of the image processor in transformers, rounding included (`tests/sizes.rs`).

use std::fmt;

use crate::{
    Rgb,
    grids::{self, FlexibleLimits},
    resample::{Filter, resample},
};

/// Maximum side of a picture whose plan is computed. Products of two sides are then exact in f64.
const MAX_SIDE: u32 = 1 << 20;

/// Maximum ratio of a picture's sides for [`SizeRule::Smart`].
const MAX_RATIO: f64 = 200.0;

/// Tokens of a picture at [`Detail::Low`], for rules without a lowest budget of their own.
const LOW_TOKENS: u32 = 256;

/// Maximum tokens of a picture at [`Detail::Auto`], unless the rule has a default of its own.
const AUTO_TOKENS: u32 = 4096;

/// Budgets of tokens for which Gemma 4 was trained.
const GEMMA_BUDGETS: [u32; 5] = [70, 140, 280, 560, 1120];

/// Longest side of a resized picture in Idefics3.
const IDEFICS_MAX: u32 = 4096;

/// Conversion of pictures to the input of one model's vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct Processor {
    /// Rule of sizes.
    pub rule: SizeRule,
    /// Filter of the resampling.
    pub filter: Filter,
    /// Mean of each channel, for values from 0 to 1.
    pub mean: [f32; 3],
    /// Standard deviation of each channel, for values from 0 to 1.
    pub std: [f32; 3],
    /// Pixels per side of a patch.
    pub patch: u32,
    /// Patches per side of one token.
    pub merge: u32,
}

/// Rule of a family for the size of a resized picture. `f` is the side of a token in pixels: `patch * merge`.
#[derive(Clone, Debug, PartialEq)]
pub enum SizeRule {
    /// Sides rounded to multiples of `f`, scaled into these limits (Qwen2-VL and later, GLM-4V, PaddleOCR-VL).
    Smart {
        /// Minimum pixels.
        min_pixels: u64,
        /// Maximum pixels.
        max_pixels: u64,
        /// Treatment of sides below `f`.
        small: SmallSides,
    },
    /// A square, without regard to the ratio (Gemma 3).
    Square {
        /// Its side.
        side: u32,
    },
    /// The largest size with sides of multiples of `f` and at most this many tokens (Gemma 4).
    Budget {
        /// Maximum tokens.
        tokens: u32,
    },
    /// Scaled down to the longest side, then both sides rounded up to multiples of `f` (Pixtral, Mistral 3).
    LongestEdge {
        /// Maximum side.
        pixels: u32,
    },
    /// Scaled to the longest side, cut into square tiles, followed by the whole picture (Idefics3, SmolVLM).
    Tiles {
        /// Longest side.
        longest_edge: u32,
        /// Side of a tile.
        tile: u32,
        /// False for only the whole picture.
        split: bool,
    },
    /// Stretched to the grid of square tiles that has the closest ratio, followed by the whole picture as one more tile if there are
    /// several (InternVL).
    Grid {
        /// Side of a tile.
        tile: u32,
        /// Minimum tiles.
        min_tiles: u32,
        /// Maximum tiles.
        max_tiles: u32,
    },
    /// Undivided within these limits of tokens; a much larger picture as a grid of square tiles with the closest ratio, followed by the
    /// whole one (LFM2-VL).
    Flexible {
        /// Minimum tokens of an undivided picture.
        min_tokens: u32,
        /// Maximum tokens of an undivided picture.
        max_tokens: u32,
        /// Ratio to `max_tokens` from which on a picture is divided.
        tolerance: f64,
        /// Side of a tile.
        tile: u32,
        /// Minimum tiles of a divided picture.
        min_tiles: u32,
        /// Maximum tiles of a divided picture; 1 if none is divided.
        max_tiles: u32,
    },
    /// Scaled down to these limits of patches, then filled with black to multiples of `f` (Kimi-VL, Kimi K2.5).
    Padded {
        /// Maximum patches.
        max_patches: u32,
        /// Maximum patches per side.
        max_side: u32,
    },
}

/// Treatment of a picture with a side below that of a token, before the rule [`SizeRule::Smart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SmallSides {
    /// None: the side is rounded (Qwen).
    Rounded,
    /// Both sides are scaled up and truncated (GLM-4V).
    Truncated,
    /// Each small side is scaled up, and the other one is rounded (PaddleOCR-VL).
    InTurn,
}

/// Requested level of detail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Detail {
    /// The model's default.
    #[default]
    Auto,
    /// Few tokens.
    Low,
    /// As many tokens as the model and the settings permit.
    High,
}

/// Bounds of a picture's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Level of detail.
    pub detail: Detail,
    /// Minimum tokens; `None` for the model's.
    pub min_tokens: Option<u32>,
    /// Maximum tokens; `None` for the model's.
    pub max_tokens: Option<u32>,
}

/// Sizes of a picture's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Sizes to which the picture is resampled one after the other. Tiles are cut from the last one.
    pub resizes: Vec<[u32; 2]>,
    /// Grid of tiles; `None` for an undivided picture.
    pub tiles: Option<Grid>,
    /// Parts in the order of the prompt: the picture, or its tiles row by row and then the whole picture.
    pub parts: Vec<Part>,
}

/// Rows and columns of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub columns: u32,
}

/// Size of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Pixels of a row.
    pub width: u32,
    /// Rows of pixels.
    pub height: u32,
    /// Rows of tokens.
    pub rows: u32,
    /// Columns of tokens.
    pub columns: u32,
}

/// Resampled pixels of a picture.
#[derive(Clone, PartialEq, Eq)]
pub struct Pixels {
    /// Sizes of the parts.
    pub parts: Vec<Part>,
    /// `[height, width, 3]` of each part, one after the other: red, green and blue, not normalized.
    pub rgb: Vec<u8>,
}

/// Reason for which a size has no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizeError {
    /// A side is 0.
    #[error("the picture of {width}×{height} pixels is empty")]
    Empty {
        /// Width of the picture.
        width: u32,
        /// Height of the picture.
        height: u32,
    },
    /// A side is beyond all limits.
    #[error("the picture of {width}×{height} pixels is too large")]
    TooLarge {
        /// Width of the picture.
        width: u32,
        /// Height of the picture.
        height: u32,
    },
    /// The sides differ too much for the model.
    #[error("the picture of {width}×{height} pixels is too narrow for this model; crop it or add borders")]
    TooNarrow {
        /// Width of the picture.
        width: u32,
        /// Height of the picture.
        height: u32,
    },
    /// The processor's numbers permit no picture.
    #[error("the model's image processor is invalid: {0}")]
    Processor(&'static str),
}

impl fmt::Debug for Pixels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pixels").field("parts", &self.parts).field("bytes", &self.rgb.len()).finish()
    }
}

impl Part {
    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.rows as usize * self.columns as usize
    }

    /// Returns the bytes of the pixels.
    pub fn bytes(&self) -> usize {
        self.width as usize * self.height as usize * 3
    }
}

impl Plan {
    /// Returns the plan of a grid of tiles, and of the whole picture if there are several.
    fn of_grid(grid: Grid, tile: Part, whole: Part) -> Self {
        let resizes = vec![[grid.columns * tile.width, grid.rows * tile.height]];
        let tiles = grid.rows as usize * grid.columns as usize;
        if tiles == 1 {
            return Self { resizes, tiles: None, parts: vec![tile] };
        }
        let mut parts = vec![tile; tiles];
        parts.push(whole);
        Self { resizes, tiles: Some(grid), parts }
    }

    /// Returns the number of image tokens, without those that a family writes around and between them.
    pub fn tokens(&self) -> usize {
        self.parts.iter().map(Part::tokens).sum()
    }

    /// Returns the bytes of all pixels.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Part::bytes).sum()
    }

    /// Returns the numbers that determine the pixels, for the key of a picture.
    pub fn fingerprint(&self) -> Vec<u8> {
        let grid = self.tiles.map_or([0, 0], |grid| [grid.rows, grid.columns]);
        let sizes = self.resizes.iter().copied().chain([grid]);
        let parts = self.parts.iter().flat_map(|part| [[part.width, part.height], [part.rows, part.columns]]);
        sizes.chain(parts).flatten().flat_map(u32::to_le_bytes).collect()
    }
}

impl Budget {
    /// Returns the most tiles of this kind beside the whole picture; 1 for an undivided one.
    fn most_tiles(self, tile: Part, own: u32) -> u32 {
        let within = |tokens: u32| (tokens as usize / tile.tokens()).saturating_sub(1);
        let most = match self.detail {
            Detail::Low => 1,
            Detail::Auto | Detail::High => self.max_tokens.map_or(usize::MAX, within),
        };
        own.min(u32::try_from(most).unwrap_or(u32::MAX)).max(1)
    }
}

impl Processor {
    /// Returns the side of a token in pixels.
    fn factor(&self) -> u32 {
        self.patch.saturating_mul(self.merge)
    }

    /// Computes the parts of a picture of this size.
    ///
    /// # Errors
    /// [`SizeError`], if the model supports no picture of this size.
    pub fn plan(&self, width: u32, height: u32, budget: Budget) -> Result<Plan, SizeError> {
        if width == 0 || height == 0 {
            return Err(SizeError::Empty { width, height });
        }
        if width > MAX_SIDE || height > MAX_SIDE {
            return Err(SizeError::TooLarge { width, height });
        }
        let factor = self.factor();
        if factor == 0 || factor > IDEFICS_MAX {
            return Err(SizeError::Processor("the side of a token must be 1 to 4096 pixels"));
        }
        let [width, height] = match self.rule {
            SizeRule::Smart { min_pixels, max_pixels, small } => {
                let limits = SmartLimits::new(factor, min_pixels, max_pixels, budget)?;
                smart(width, height, factor, &limits, small)?
            }
            SizeRule::Square { side } => match side % factor {
                0 if side > 0 => [side, side],
                _ => return Err(SizeError::Processor("the side is not a multiple of a token's side")),
            },
            SizeRule::Budget { tokens } => {
                let tokens = gemma_tokens(tokens, budget);
                within_budget(width, height, factor, tokens)?
            }
            SizeRule::LongestEdge { pixels } => {
                longest_edge(width, height, factor, lowered_edge(pixels, factor, budget))?
            }
            SizeRule::Tiles { longest_edge, tile, split } => {
                return self.tiles(width, height, longest_edge, tile, split, budget);
            }
            SizeRule::Grid { tile, min_tiles, max_tiles } => {
                let whole = self.tile(tile)?;
                let most = budget.most_tiles(whole, max_tiles);
                let grid = grids::closest(width, height, tile, min_tiles.min(most), most)?;
                return Ok(Plan::of_grid(grid, whole, whole));
            }
            SizeRule::Flexible { min_tokens, max_tokens, tolerance, tile, min_tiles, max_tiles } => {
                let part = self.tile(tile)?;
                let most = budget.max_tokens.map_or(max_tokens, |tokens| max_tokens.min(tokens.max(1)));
                let limits = FlexibleLimits { min: min_tokens.min(most), max: most, tolerance };
                let [columns, rows] = grids::flexible(width, height, factor, limits)?;
                let whole = self.part(columns, rows);
                let most = budget.most_tiles(part, max_tiles);
                let is_divided = most > 1 && min_tiles <= most;
                if is_divided && grids::is_large(width, height, factor, self.patch, limits) {
                    let grid = grids::closest(width, height, tile, min_tiles, most)?;
                    return Ok(Plan::of_grid(grid, part, whole));
                }
                [columns, rows]
            }
            SizeRule::Padded { max_patches, max_side } => {
                return self.padded(width, height, max_patches, max_side, budget);
            }
        };
        Ok(Plan { resizes: vec![[width, height]], tiles: None, parts: vec![self.part(width, height)] })
    }

    fn padded(
        &self,
        width: u32,
        height: u32,
        max_patches: u32,
        max_side: u32,
        budget: Budget,
    ) -> Result<Plan, SizeError> {
        let most = match budget.detail {
            Detail::Low => Some(LOW_TOKENS.min(budget.max_tokens.unwrap_or(LOW_TOKENS))),
            Detail::Auto | Detail::High => budget.max_tokens,
        };
        let most = most.map_or(usize::MAX, |tokens| tokens.max(1) as usize);
        let mut patches = max_patches;
        loop {
            let resized = grids::shrunk(width, height, self.patch, patches, max_side)?;
            let [full_width, full_height] = resized.map(|side| side.next_multiple_of(self.factor()));
            let part = self.part(full_width, full_height);
            if part.tokens() <= most {
                return Ok(Plan { resizes: vec![resized], tiles: None, parts: vec![part] });
            }
            // The borders add patches, so the bound of tokens may need several steps.
            let fewer = (u64::from(patches) * most as u64 / part.tokens() as u64) as u32;
            patches = fewer.min(patches - 1);
            if patches == 0 {
                return Err(SizeError::TooNarrow { width, height });
            }
        }
    }

    /// Returns the part that a square tile is.
    fn tile(&self, side: u32) -> Result<Part, SizeError> {
        match side > 0 && side <= IDEFICS_MAX && side.is_multiple_of(self.factor()) {
            true => Ok(self.part(side, side)),
            false => Err(SizeError::Processor("a tile's side is not a multiple of a token's side")),
        }
    }

    fn part(&self, width: u32, height: u32) -> Part {
        let factor = self.factor();
        Part { width, height, rows: height / factor, columns: width / factor }
    }

    fn tiles(
        &self,
        width: u32,
        height: u32,
        longest_edge: u32,
        tile: u32,
        split: bool,
        budget: Budget,
    ) -> Result<Plan, SizeError> {
        let whole = self.tile(tile)?;
        let mut edge = longest_edge.clamp(1, IDEFICS_MAX);
        let most = budget.max_tokens.map_or(usize::MAX, |tokens| (tokens as usize / whole.tokens()).max(1));
        let split = split && budget.detail != Detail::Low;
        loop {
            let first = idefics_edge(width, height, edge);
            if !split || most == 1 {
                let resizes = vec![first, [tile, tile]];
                return Ok(Plan { resizes, tiles: None, parts: vec![whole] });
            }
            let cut = idefics_multiple(first, tile);
            let grid = Grid { rows: cut[1] / tile, columns: cut[0] / tile };
            let tiles = grid.rows as usize * grid.columns as usize;
            if tiles == 1 {
                return Ok(Plan { resizes: vec![first, cut], tiles: None, parts: vec![whole] });
            }
            if tiles < most || edge <= tile {
                let parts = vec![whole; tiles + 1];
                return Ok(Plan { resizes: vec![first, cut], tiles: Some(grid), parts });
            }
            edge = edge.saturating_sub(tile).max(tile);
        }
    }

    /// Resamples a picture to the parts of its plan.
    pub fn prepare(&self, picture: &Rgb, plan: &Plan) -> Pixels {
        let mut current = None;
        for &[width, height] in &plan.resizes {
            let resized = resample(current.as_ref().unwrap_or(picture), width, height, self.filter);
            current = Some(resized);
        }
        let Some(resized) = current else {
            return Pixels { parts: Vec::new(), rgb: Vec::new() };
        };
        let Some(grid) = plan.tiles else {
            let rgb = match plan.parts.first() {
                Some(part) if [part.width, part.height] != [resized.width, resized.height] => {
                    padded(&resized, *part)
                }
                _ => resized.rgb,
            };
            return Pixels { parts: plan.parts.clone(), rgb };
        };
        let mut rgb = Vec::with_capacity(plan.bytes());
        let (Some(tile), Some(whole)) = (plan.parts.first(), plan.parts.last()) else {
            return Pixels { parts: Vec::new(), rgb };
        };
        let bytes = tile.width as usize * 3;
        for row in 0..grid.rows {
            for column in 0..grid.columns {
                for y in 0..tile.height {
                    let pixel = (row * tile.height + y) as usize * resized.width as usize
                        + (column * tile.width) as usize;
                    rgb.extend_from_slice(&resized.rgb[pixel * 3..pixel * 3 + bytes]);
                }
            }
        }
        let from = match self.rule {
            SizeRule::Tiles { .. } => &resized,
            _ => picture,
        };
        rgb.extend_from_slice(&resample(from, whole.width, whole.height, self.filter).rgb);
        Pixels { parts: plan.parts.clone(), rgb }
    }
}

/// Returns the pixels of a part whose first ones are this picture, and the others black.
fn padded(picture: &Rgb, part: Part) -> Vec<u8> {
    let mut rgb = vec![0; part.bytes()];
    let lines = picture.rgb.chunks_exact((picture.width as usize * 3).max(1));
    for (to, from) in rgb.chunks_exact_mut((part.width as usize * 3).max(1)).zip(lines) {
        to[..from.len()].copy_from_slice(from);
    }
    rgb
}

/// Limits of [`SizeRule::Smart`] within a budget.
struct SmartLimits {
    min_pixels: f64,
    max_pixels: f64,
    /// Maximum tokens of the request. The limits of pixels alone do not bound narrow pictures.
    max_tokens: f64,
}

impl SmartLimits {
    fn new(factor: u32, min: u64, max: u64, budget: Budget) -> Result<Self, SizeError> {
        let pixels = |tokens: u32| u64::from(tokens) * u64::from(factor).pow(2);
        let most = match (budget.detail, budget.max_tokens) {
            (Detail::Low, tokens) => LOW_TOKENS.min(tokens.unwrap_or(LOW_TOKENS)),
            (Detail::Auto, tokens) => tokens.unwrap_or(AUTO_TOKENS),
            (Detail::High, tokens) => tokens.unwrap_or(u32::MAX),
        };
        let most = most.max(1);
        let max = max.min(pixels(most));
        let min = min.max(budget.min_tokens.map_or(0, pixels)).min(max);
        if max < pixels(1) {
            return Err(SizeError::Processor("no token fits into the maximum of pixels"));
        }
        Ok(Self { min_pixels: min as f64, max_pixels: max as f64, max_tokens: most.into() })
    }
}

/// `smart_resize` of Qwen2-VL, and with `small` of GLM-4V and PaddleOCR-VL.
fn smart(
    width: u32,
    height: u32,
    factor: u32,
    limits: &SmartLimits,
    small: SmallSides,
) -> Result<[u32; 2], SizeError> {
    let f = f64::from(factor);
    let (w, h) = small.enlarged(f64::from(width), f64::from(height), f);
    if w.max(h) / w.min(h) > MAX_RATIO {
        return Err(SizeError::TooNarrow { width, height });
    }
    let shrunk = || {
        let beta = (h * w / limits.max_pixels).sqrt();
        [(w / beta / f).floor().max(1.0), (h / beta / f).floor().max(1.0)]
    };
    let [mut columns, mut rows] = [(w / f).round_ties_even(), (h / f).round_ties_even()];
    let pixels = columns * f * rows * f;
    if pixels > limits.max_pixels {
        [columns, rows] = shrunk();
    } else if pixels < limits.min_pixels {
        let beta = (limits.min_pixels / (h * w)).sqrt();
        [columns, rows] = [(w * beta / f).ceil(), (h * beta / f).ceil()];
    }
    // Without a minimum, a side may be rounded to 0.
    (columns, rows) = (columns.max(1.0), rows.max(1.0));
    // Rounding up to the minimum exceeds a maximum close to it.
    if columns * rows > limits.max_tokens {
        [columns, rows] = shrunk();
        if columns > rows {
            columns = columns.min((limits.max_tokens / rows).floor().max(1.0));
        } else {
            rows = rows.min((limits.max_tokens / columns).floor().max(1.0));
        }
    }
    Ok([side(columns, f), side(rows, f)])
}

impl SmallSides {
    /// Returns width and height before the rule.
    fn enlarged(self, mut width: f64, mut height: f64, factor: f64) -> (f64, f64) {
        match self {
            Self::Rounded => {}
            Self::Truncated if width < factor || height < factor => {
                let scale = (factor / height).max(factor / width);
                (width, height) = ((width * scale).trunc(), (height * scale).trunc());
            }
            Self::Truncated => {}
            Self::InTurn => {
                if height < factor {
                    (width, height) = ((width * factor / height).round_ties_even(), factor);
                }
                if width < factor {
                    (width, height) = (factor, (height * factor / width).round_ties_even());
                }
            }
        }
        (width, height)
    }
}

/// Returns `count * factor` for a whole number `count`.
fn side(count: f64, factor: f64) -> u32 {
    (count * factor) as u32
}

/// Returns the budget of Gemma 4 for a request: one for which the model was trained, or the default.
fn gemma_tokens(default: u32, budget: Budget) -> u32 {
    let (least, most) = (budget.min_tokens.unwrap_or(0), budget.max_tokens.unwrap_or(u32::MAX));
    let mut tokens = match budget.detail {
        Detail::Low => default.min(GEMMA_BUDGETS[0]),
        Detail::Auto => default,
        Detail::High => default.max(GEMMA_BUDGETS[GEMMA_BUDGETS.len() - 1]),
    };
    if tokens < least {
        tokens = GEMMA_BUDGETS.into_iter().find(|&budget| budget >= least).unwrap_or(tokens);
    }
    if tokens > most {
        let smaller = GEMMA_BUDGETS.into_iter().rev().find(|&budget| budget <= most);
        tokens = smaller.unwrap_or(default.min(GEMMA_BUDGETS[0]));
    }
    tokens
}

/// Maximum tokens of a budget: sides of as many tokens are numbers of 32 bits.
const MAX_BUDGET: u32 = 1 << 16;

/// `get_aspect_ratio_preserving_size` of Gemma 4.
fn within_budget(width: u32, height: u32, factor: u32, tokens: u32) -> Result<[u32; 2], SizeError> {
    if tokens > MAX_BUDGET {
        return Err(SizeError::Processor("the budget of a picture must be at most 65536 tokens"));
    }
    let (w, h, f) = (f64::from(width), f64::from(height), f64::from(factor));
    let target = f64::from(tokens) * f * f;
    let scale = (target / (h * w)).sqrt();
    let mut rows = (scale * h / f).floor();
    let mut columns = (scale * w / f).floor();
    if rows == 0.0 && columns == 0.0 {
        return Err(SizeError::TooNarrow { width, height });
    }
    if rows == 0.0 {
        rows = 1.0;
        columns = (w / h).floor().min(f64::from(tokens));
    } else if columns == 0.0 {
        columns = 1.0;
        rows = (h / w).floor().min(f64::from(tokens));
    }
    if rows * columns > f64::from(tokens) {
        return Err(SizeError::TooNarrow { width, height });
    }
    Ok([side(columns, f), side(rows, f)])
}

/// Returns the longest side of Pixtral's rule within a budget of tokens.
fn lowered_edge(pixels: u32, factor: u32, budget: Budget) -> u32 {
    let most = match budget.detail {
        Detail::Low => Some(LOW_TOKENS.min(budget.max_tokens.unwrap_or(LOW_TOKENS))),
        Detail::Auto | Detail::High => budget.max_tokens,
    };
    most.map_or(pixels, |tokens| pixels.min(tokens.max(1).isqrt().saturating_mul(factor)))
}

/// `get_resize_output_image_size` of Pixtral.
fn longest_edge(width: u32, height: u32, factor: u32, most: u32) -> Result<[u32; 2], SizeError> {
    if most == 0 || most > MAX_SIDE {
        return Err(SizeError::Processor("the longest side must be 1 to 1048576 pixels"));
    }
    let (mut w, mut h) = (f64::from(width), f64::from(height));
    let ratio = (h / f64::from(most)).max(w / f64::from(most));
    if ratio > 1.0 {
        (w, h) = ((w / ratio).floor(), (h / ratio).floor());
    }
    if w < 1.0 || h < 1.0 {
        return Err(SizeError::TooNarrow { width, height });
    }
    let multiple = |side: f64| ((side as u32 - 1) / factor + 1) * factor;
    Ok([multiple(w), multiple(h)])
}

/// `get_resize_output_image_size` of Idefics3.
fn idefics_edge(width: u32, height: u32, longest: u32) -> [u32; 2] {
    let ratio = f64::from(width) / f64::from(height);
    let even = |side: f64| {
        let side = side as u32;
        side + side % 2
    };
    if width >= height {
        [longest.max(1), even(f64::from(longest) / ratio).max(1)]
    } else {
        [even(f64::from(longest) * ratio).max(1), longest.max(1)]
    }
}

/// `resize_for_vision_encoder` of Idefics3.
fn idefics_multiple([width, height]: [u32; 2], tile: u32) -> [u32; 2] {
    let ratio = f64::from(width) / f64::from(height);
    let multiple = |side: u32| side.div_ceil(tile).max(1) * tile;
    if width >= height {
        let width = multiple(width);
        [width, multiple((f64::from(width) / ratio) as u32)]
    } else {
        let height = multiple(height);
        [multiple((f64::from(height) * ratio) as u32), height]
    }
}
