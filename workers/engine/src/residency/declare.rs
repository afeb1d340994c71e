//! What a segment needs: its layers, and through them its tensors.

use crate::ops::{Conv2d, Linear, Padding, UpsampleConv2d};

/// A segment's place in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// First: turns inputs into the state.
    Prelude,
    /// One of many that may be streamed.
    Block,
    /// Last: turns the state into outputs.
    Epilogue,
}

/// One tensor of a weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Declared name.
    pub name: String,
    /// Its shape; the first is what a configuration means, others are what older files have for the same numbers.
    pub shapes: Vec<Vec<usize>>,
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub(super) usize);
    )*};
}

handles! {
    /// A fully connected layer of the segment that declared it.
    LinearId,
    /// A convolution of the segment that declared it.
    ConvId,
    /// An upsampling convolution of the segment that declared it.
    UpsampleId,
    /// A normalisation's scale and shift, of the segment that declared it.
    NormId,
    /// A plain tensor of the segment that declared it.
    TableId,
}

/// The shape of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvShape {
    /// Channels of the input.
    pub input: usize,
    /// Channels of the output.
    pub output: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// Stride on both axes.
    pub stride: usize,
    /// Zeros around the input.
    pub padding: Padding,
}

/// One layer, as a segment declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSpec {
    /// One matrix product; several layers that share their input are stacked into one.
    Linear {
        /// Names of the layers whose outputs follow one another.
        parts: Vec<String>,
        /// Width of the input.
        input: usize,
        /// Width of each part's output.
        outputs: Vec<usize>,
        /// Whether the parts have a bias.
        bias: bool,
    },
    /// A convolution with bias.
    Conv {
        /// Its name.
        name: String,
        /// Its shape.
        shape: ConvShape,
    },
    /// A 3×3 convolution with bias after nearest-neighbour doubling.
    Upsample {
        /// Its name.
        name: String,
        /// Channels, in and out.
        channels: usize,
    },
    /// Scale and shift of a normalisation.
    Norm {
        /// Its name.
        name: String,
        /// Channels.
        channels: usize,
    },
    /// A tensor as it is.
    Table {
        /// The tensor's full name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}

impl LayerSpec {
    /// The tensors that the layer is made of.
    pub fn parameters(&self) -> Vec<Parameter> {
        let one = |name: String, shape: Vec<usize>| Parameter { name, shapes: vec![shape] };
        match self {
            LayerSpec::Linear { parts, input, outputs, bias } => {
                let mut list = Vec::new();
                for (part, &output) in parts.iter().zip(outputs) {
                    let shapes = vec![vec![output, *input], vec![output, *input, 1, 1]];
                    list.push(Parameter { name: format!("{part}.weight"), shapes });
                    if *bias {
                        list.push(one(format!("{part}.bias"), vec![output]));
                    }
                }
                list
            }
            LayerSpec::Conv { name, shape: s } => vec![
                one(format!("{name}.weight"), vec![s.output, s.input, s.kernel, s.kernel]),
                one(format!("{name}.bias"), vec![s.output]),
            ],
            LayerSpec::Upsample { name, channels } => vec![
                one(format!("{name}.weight"), vec![*channels, *channels, 3, 3]),
                one(format!("{name}.bias"), vec![*channels]),
            ],
            LayerSpec::Norm { name, channels } => {
                vec![one(format!("{name}.weight"), vec![*channels]), one(format!("{name}.bias"), vec![*channels])]
            }
            LayerSpec::Table { name, shape } => vec![one(name.clone(), shape.clone())],
        }
    }

    /// Bytes that the layer holds on the CPU device once bound: f32, packed as its operation wants it.
    pub fn bound_bytes(&self) -> u64 {
        let bytes = match self {
            LayerSpec::Linear { input, outputs, bias, .. } => {
                let rows: usize = outputs.iter().sum();
                Linear::bytes_of(rows, *input) - if *bias { 0 } else { 4 * rows }
            }
            LayerSpec::Conv { shape: s, .. } => Conv2d::bytes_of(s.output, s.input, (s.kernel, s.kernel), s.stride),
            LayerSpec::Upsample { channels, .. } => UpsampleConv2d::bytes_of(*channels, *channels),
            LayerSpec::Norm { channels, .. } => 4 * 2 * channels,
            LayerSpec::Table { shape, .. } => 4 * shape.iter().product::<usize>(),
        };
        bytes as u64
    }
}

/// The layers of one segment, in the order in which they are bound.
#[derive(Clone, Debug)]
pub struct Declarations {
    name: String,
    role: Role,
    layers: Vec<LayerSpec>,
    counts: [usize; 5],
}

impl Declarations {
    /// Of a segment called `name`, which also starts the names of layers declared with a leading dot.
    pub fn new(name: impl Into<String>, role: Role) -> Self {
        Self { name: name.into(), role, layers: Vec::new(), counts: [0; 5] }
    }

    /// The segment's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The segment's place.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The declared layers.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// All tensors of the segment.
    pub fn parameters(&self) -> impl Iterator<Item = Parameter> {
        self.layers.iter().flat_map(LayerSpec::parameters)
    }

    /// Bytes that the segment holds on the CPU device once bound.
    pub fn bound_bytes(&self) -> u64 {
        self.layers.iter().map(LayerSpec::bound_bytes).sum()
    }

    fn push(&mut self, kind: usize, layer: LayerSpec) -> usize {
        self.layers.push(layer);
        self.counts[kind] += 1;
        self.counts[kind] - 1
    }

    /// A fully connected layer; its weight may also come as a 1×1 convolution's.
    pub fn linear(&mut self, name: impl Into<String>, input: usize, output: usize, bias: bool) -> LinearId {
        self.stacked(vec![name.into()], input, &[output], bias)
    }

    /// Several fully connected layers over one input as one product; outputs follow one another.
    pub fn stacked(&mut self, parts: Vec<String>, input: usize, outputs: &[usize], bias: bool) -> LinearId {
        LinearId(self.push(0, LayerSpec::Linear { parts, input, outputs: outputs.to_vec(), bias }))
    }

    /// A convolution with bias.
    pub fn conv(&mut self, name: impl Into<String>, shape: ConvShape) -> ConvId {
        ConvId(self.push(1, LayerSpec::Conv { name: name.into(), shape }))
    }

    /// A 3×3 convolution with stride 1 and padding 1.
    pub fn conv3x3(&mut self, name: impl Into<String>, input: usize, output: usize) -> ConvId {
        self.conv(name, ConvShape { input, output, kernel: 3, stride: 1, padding: Padding::uniform(1) })
    }

    /// A 3×3 convolution after nearest-neighbour doubling.
    pub fn upsample(&mut self, name: impl Into<String>, channels: usize) -> UpsampleId {
        UpsampleId(self.push(2, LayerSpec::Upsample { name: name.into(), channels }))
    }

    /// Scale and shift of a normalisation.
    pub fn norm(&mut self, name: impl Into<String>, channels: usize) -> NormId {
        NormId(self.push(3, LayerSpec::Norm { name: name.into(), channels }))
    }

    /// A tensor as it is.
    pub fn table(&mut self, name: impl Into<String>, shape: &[usize]) -> TableId {
        TableId(self.push(4, LayerSpec::Table { name: name.into(), shape: shape.to_vec() }))
    }
}
