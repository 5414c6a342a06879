//! The orientation of a picture in its metadata.

/// Transformations that show a picture upright, by the numbers of EXIF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orientation {
    /// Rows and columns are exchanged, before the flips.
    pub transposed: bool,
    /// Columns are in reverse order.
    pub flips_columns: bool,
    /// Rows are in reverse order.
    pub flips_rows: bool,
}

/// Tag of the orientation.
const ORIENTATION: u16 = 0x112;

impl Orientation {
    /// Reads the orientation of EXIF data, which begin with a TIFF header. Invalid data have none.
    pub fn of(exif: &[u8]) -> Self {
        let exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
        let tag = if exif.starts_with(b"II*\0") {
            find(exif, u16::from_le_bytes, u32::from_le_bytes)
        } else if exif.starts_with(b"MM\0*") {
            find(exif, u16::from_be_bytes, u32::from_be_bytes)
        } else {
            None
        };
        let of = |transposed, flips_columns, flips_rows| Self { transposed, flips_columns, flips_rows };
        match tag {
            Some(2) => of(false, true, false),
            Some(3) => of(false, true, true),
            Some(4) => of(false, false, true),
            Some(5) => of(true, false, false),
            Some(6) => of(true, true, false),
            Some(7) => of(true, true, true),
            Some(8) => of(true, false, true),
            _ => Self::default(),
        }
    }

    /// Returns the size as it is shown.
    pub fn size(self, width: u32, height: u32) -> (u32, u32) {
        if self.transposed { (height, width) } else { (width, height) }
    }

    /// Applies the transformation to pixels of three bytes.
    pub fn apply(self, rgb: Vec<u8>, width: usize, height: usize) -> Vec<u8> {
        if self == Self::default() {
            return rgb;
        }
        let (to_width, to_height) = if self.transposed { (height, width) } else { (width, height) };
        let mut output = Vec::with_capacity(rgb.len());
        for y in 0..to_height {
            let y = if self.flips_rows { to_height - 1 - y } else { y };
            for x in 0..to_width {
                let x = if self.flips_columns { to_width - 1 - x } else { x };
                let (from_x, from_y) = if self.transposed { (y, x) } else { (x, y) };
                let at = (from_y * width + from_x) * 3;
                output.extend_from_slice(&rgb[at..at + 3]);
            }
        }
        output
    }
}

/// Finds the orientation in the first directory of a TIFF header.
fn find(tiff: &[u8], short: fn([u8; 2]) -> u16, long: fn([u8; 4]) -> u32) -> Option<u16> {
    let short_at = |at: usize| Some(short(tiff.get(at..at.checked_add(2)?)?.try_into().ok()?));
    let long_at = |at: usize| Some(long(tiff.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let directory = usize::try_from(long_at(4)?).ok()?;
    let entries = usize::from(short_at(directory)?);
    (0..entries).map_while(|entry| directory.checked_add(2 + entry * 12)).find_map(|at| {
        // One value of the type SHORT.
        let is_orientation = short_at(at)? == ORIENTATION && short_at(at + 2)? == 3 && long_at(at + 4)? == 1;
        if is_orientation { short_at(at + 8) } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_orientations_show_the_same_picture() {
        // The picture 1 2 3 / 4 5 6, as a camera would store it for each orientation.
        let upright = [1, 2, 3, 4, 5, 6];
        let stored: [(u8, usize, [u8; 6]); 8] = [
            (1, 3, [1, 2, 3, 4, 5, 6]),
            (2, 3, [3, 2, 1, 6, 5, 4]),
            (3, 3, [6, 5, 4, 3, 2, 1]),
            (4, 3, [4, 5, 6, 1, 2, 3]),
            (5, 2, [1, 4, 2, 5, 3, 6]),
            (6, 2, [3, 6, 2, 5, 1, 4]),
            (7, 2, [6, 3, 5, 2, 4, 1]),
            (8, 2, [4, 1, 5, 2, 6, 3]),
        ];
        for (number, width, pixels) in stored {
            let mut exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\0\0\0".to_vec();
            exif[19] = number;
            let orientation = Orientation::of(&exif);
            let rgb = pixels.iter().flat_map(|&pixel| [pixel; 3]).collect();
            let shown = orientation.apply(rgb, width, 6 / width);
            let shown: Vec<u8> = shown.chunks_exact(3).map(|pixel| pixel[0]).collect();
            assert_eq!(shown, upright, "orientation {number}");
            assert_eq!(orientation.size(width as u32, (6 / width) as u32), (3, 2), "orientation {number}");
        }
    }

    #[test]
    fn damaged_metadata_have_no_orientation() {
        let whole = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";
        assert!(Orientation::of(whole).transposed);
        for end in 0..whole.len() - 2 {
            assert_eq!(Orientation::of(&whole[..end]), Orientation::default(), "{end} bytes");
        }
        assert_eq!(Orientation::of(b"II*\0\xff\xff\xff\xff"), Orientation::default());
    }
}
