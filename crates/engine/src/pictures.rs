//! Pictures of a request: where their rows are, what identifies them in keys of blocks, and the coordinates of all rows.
//!
//! The key of a block also contains the keys of its pictures and their places, so two pictures never share a block, and
//! tiers and events need no rules of their own. A sequence is computed up to its first picture that is not encoded. A
//! picture whose K and V are cached is neither decoded nor encoded. Rows that see each other (Gemma 3) are in one step.

use std::{fmt, ops::Range, sync::Arc};

use paguro_backend::{AXES, Coordinates};
use paguro_vision::Pixels;
use sha2::{Digest, Sha256};

use crate::events::ExtraKey;

/// A picture in a prompt.
#[derive(Clone, Debug)]
pub struct Picture {
    /// Identifies its rows: a hash of the file, of how it is prepared, and of the tower. Two pictures with one key are one.
    pub key: [u8; 32],
    /// Ranges of the prompt in whose place its rows are, in order and disjoint: of all of its parts, one after the other.
    pub rows: Vec<Range<usize>>,
    /// Rows and columns of its only part, for models that rotate by them.
    pub grid: [u32; 2],
    /// Its pixels, if they are needed.
    pub pixels: Arc<dyn PixelSource>,
}

/// Pixels of a picture, made when they are needed: neither if K and V of its rows are cached, nor if the rows are.
pub trait PixelSource: Send + Sync + fmt::Debug {
    /// Returns the pixels. It is called on a thread of its own and may take long.
    ///
    /// # Errors
    /// The problem of the picture, with which the request fails.
    fn pixels(&self) -> Result<Arc<Pixels>, String>;
}

/// Pixels that are there.
impl PixelSource for Arc<Pixels> {
    fn pixels(&self) -> Result<Arc<Pixels>, String> {
        Ok(Self::clone(self))
    }
}

/// Pictures of a request.
#[derive(Debug, Default)]
pub(crate) struct Pictures {
    all: Vec<Picture>,
    /// Keys of their rows, which also depend on the salt of the request.
    keys: Vec<[u8; 32]>,
    /// All ranges of rows, in order.
    places: Vec<Place>,
}

/// A range of rows of a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Positions in the prompt.
    pub rows: Range<usize>,
    /// Index of the picture.
    pub picture: usize,
    /// Number of the first row within the picture.
    pub first: usize,
    /// First coordinate of the picture.
    coordinate: u32,
    /// Distance from the position to the coordinates of a token after it.
    shift: usize,
}

impl Pictures {
    /// Arranges the pictures of a request with this salt. They were checked.
    pub fn new(all: Vec<Picture>, salt: &[u8]) -> Self {
        let (mut places, mut shift) = (Vec::new(), 0);
        for (picture, Picture { rows, grid, .. }) in all.iter().enumerate() {
            let mut first = 0;
            for range in rows {
                let coordinate = (range.start - shift) as u32;
                // A picture of one part takes as many coordinates as its longer side.
                let taken = if rows.len() == 1 { grid[0].max(grid[1]) as usize } else { range.len() };
                shift += range.len().saturating_sub(taken);
                places.push(Place { rows: range.clone(), picture, first, coordinate, shift });
                first += range.len();
            }
        }
        let key = |picture: &Picture| match salt {
            [] => picture.key,
            salt => {
                Sha256::new().chain_update(Sha256::digest(salt)).chain_update(picture.key).finalize().into()
            }
        };
        let keys = all.iter().map(key).collect();
        Self { all, keys, places }
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the key of a picture's rows in the cache.
    pub fn key(&self, picture: usize) -> [u8; 32] {
        self.keys[picture]
    }

    /// Returns the source of its pixels.
    pub fn pixels(&self, picture: usize) -> &Arc<dyn PixelSource> {
        &self.all[picture].pixels
    }

    /// Returns the number of its rows.
    pub fn rows(&self, picture: usize) -> usize {
        self.all[picture].rows.iter().map(ExactSizeIterator::len).sum()
    }

    /// Returns the ranges of rows that overlap these positions.
    pub fn places_in(&self, positions: Range<usize>) -> impl Iterator<Item = &Place> {
        let first = self.places.partition_point(|place| place.rows.end <= positions.start);
        self.places[first..].iter().take_while(move |place| place.rows.start < positions.end)
    }

    /// Returns the range of rows that these two neighbours are both in: `before` and the position after it.
    pub fn across(&self, end: usize) -> Option<&Place> {
        self.places_in(end..end + 1).next().filter(|place| place.rows.start < end)
    }

    /// Returns what identifies the pictures of a block beside its tokens: for each its key, and the place of the block's first
    /// position in it. Empty for a block of text.
    pub fn extras(&self, block: Range<usize>) -> Vec<([u8; 32], i64)> {
        let extra = |place: &Place| {
            let offset = place.first as i64 + block.start as i64 - place.rows.start as i64;
            (self.all[place.picture].key, offset)
        };
        self.places_in(block.clone()).map(extra).collect()
    }

    /// Returns the pictures of a block as events name them: once each, with the place of the picture's first row.
    pub fn extra_keys(&self, block: Range<usize>) -> Vec<ExtraKey> {
        let mut pictures: Vec<usize> = self.places_in(block.clone()).map(|place| place.picture).collect();
        pictures.dedup();
        let extra_key = |picture: usize| {
            let Picture { key, rows, .. } = &self.all[picture];
            let first = rows.first().map_or(block.start, |range| range.start);
            ExtraKey::Picture { key: *key, offset: first as i64 - block.start as i64 }
        };
        pictures.into_iter().map(extra_key).collect()
    }

    /// Returns the coordinates of a row.
    pub fn coordinates(&self, position: usize) -> Coordinates {
        let before = self.places.partition_point(|place| place.rows.start <= position);
        let Some(place) = before.checked_sub(1).map(|index| &self.places[index]) else {
            return [position as u32; AXES];
        };
        if position >= place.rows.end {
            return [(position - place.shift) as u32; AXES];
        }
        let (at, columns) = (position - place.rows.start, self.all[place.picture].grid[1].max(1) as usize);
        let first = place.coordinate;
        [first, first + (at / columns) as u32, first + (at % columns) as u32]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(key: u8, rows: Range<usize>, grid: [u32; 2]) -> Picture {
        let pixels = Arc::new(Pixels { parts: Vec::new(), rgb: Vec::new() });
        Picture { key: [key; 32], rows: vec![rows], grid, pixels: Arc::new(pixels) }
    }

    #[test]
    fn text_after_a_picture_continues_at_its_longer_side() {
        // transformers' `get_rope_index` for two pictures of 2 x 3 and 4 x 1 rows.
        let pictures = Pictures::new(vec![picture(1, 2..8, [2, 3]), picture(2, 9..13, [4, 1])], b"");
        let all: Vec<_> = (0..15).map(|position| pictures.coordinates(position)).collect();
        let expected = [
            [0; 3],
            [1; 3], // text
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5; 3], // text
            [6, 6, 6],
            [6, 7, 6],
            [6, 8, 6],
            [6, 9, 6],
            [10; 3],
            [11; 3],
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn blocks_have_the_places_of_their_pictures() {
        let pictures = Pictures::new(vec![picture(1, 2..8, [2, 3]), picture(2, 9..13, [4, 1])], b"");
        assert_eq!(pictures.extras(0..2), []);
        assert_eq!(pictures.extras(0..4), [([1; 32], -2)]);
        assert_eq!(pictures.extras(4..8), [([1; 32], 2)]);
        assert_eq!(pictures.extras(4..12), [([1; 32], 2), ([2; 32], -5)]);
        assert_eq!(pictures.extras(13..17), []);
        assert_eq!(pictures.across(2), None);
        assert_eq!(pictures.across(3).map(|place| place.rows.clone()), Some(2..8));
        assert_eq!(pictures.across(8), None);
    }

    #[test]
    fn events_name_each_picture_of_a_block_once() {
        let tiles = Picture { rows: vec![2..4, 5..7], ..picture(1, 0..0, [1, 4]) };
        let pictures = Pictures::new(vec![tiles, picture(2, 9..13, [4, 1])], b"");
        let named = |key: u8, offset: i64| ExtraKey::Picture { key: [key; 32], offset };
        assert_eq!(pictures.extra_keys(0..2), []);
        assert_eq!(pictures.extra_keys(0..8), [named(1, 2)]);
        assert_eq!(pictures.extra_keys(4..12), [named(1, -2), named(2, 5)]);
        assert_eq!(pictures.extra_keys(12..16), [named(2, -3)]);
    }

    #[test]
    fn salts_part_rows_of_one_picture() {
        let of = |salt: &[u8]| Pictures::new(vec![picture(1, 0..1, [1, 1])], salt).key(0);
        assert_eq!(of(b""), [1; 32]);
        assert_ne!(of(b"a"), of(b""));
        assert_ne!(of(b"a"), of(b"b"));
    }
}
