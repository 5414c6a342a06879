//! Pictures of a sequence: rows that wait for the encoder, and spans that are not cut.

use super::Sequence;

impl Sequence {
    /// Returns the first picture whose rows are needed and not encoded, and the position of the first of these rows.
    pub fn first_picture(&self) -> Option<(usize, usize)> {
        let pictures = &self.request.pictures;
        let mut missing = pictures.places_in(self.kv.computed..self.tokens.len());
        let place = missing.find(|place| self.encoded[place.picture].is_none())?;
        Some((place.picture, place.rows.start.max(self.kv.computed)))
    }

    /// Returns true if the sequence has no rows because its next one is that of a picture that is not encoded.
    pub fn awaits_picture(&self) -> bool {
        self.first_picture().is_some_and(|(_, at)| at == self.kv.computed)
    }

    /// Drops the rows of pictures that are computed.
    pub(super) fn drop_computed_pictures(&mut self) {
        if self.encoded.iter().all(Option::is_none) {
            return;
        }
        let mut needed = vec![false; self.encoded.len()];
        let places = self.request.pictures.places_in(self.kv.computed..self.tokens.len());
        places.for_each(|place| needed[place.picture] = true);
        self.encoded.iter_mut().zip(needed).filter(|(_, needed)| !needed).for_each(|(rows, _)| *rows = None);
    }

    /// Returns the number of rows, of `rows` that may be computed and `most` at all, with which no span is cut: rows of a
    /// picture that see each other. A span that is first is complete or absent.
    pub fn uncut(&self, rows: usize, most: usize) -> usize {
        let start = self.next_position();
        let end = start + rows;
        let pictures = &self.request.pictures;
        let first = pictures.places_in(start..start + 1).next();
        match (first, pictures.across(end)) {
            // Also if it would take longer than a step should.
            (Some(place), _) if end < place.rows.end => {
                let all = place.rows.end - start;
                if all <= most { all } else { 0 }
            }
            (_, Some(place)) => place.rows.start - start,
            (_, None) => rows,
        }
    }

    /// Returns true if a position from `first` on has a row of a picture.
    pub fn has_pictures_after(&self, first: usize) -> bool {
        self.request.pictures.places_in(first..self.tokens.len().max(first)).next().is_some()
    }
}
